"""What the attentions look at, as a page: statistics by layer, then pictures of the chosen heads of both paths."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ra import maps
from study.attention import PATHS, STATISTICS, Seen, Text, halves, layer_means, used_path
from study.html import Figure, colour, legend, plot, swatch, table, text
from study.html import page as whole_page
from study.words import ONE_CLASS

FLOOR = 1e-4  # of a picture's colours as mass: less looks like none
READABLE = 48  # tokens up to which a picture names them
SIDE, GAP = 330, 84  # pixels on the screen
SPANS = (1, 6)  # powers of two that the colours against an even spread may reach
DIVERGING = [[0, "#2166ac"], [0.25, "#92c5de"], [0.5, "#f4f4f2"], [0.75, "#f4a582"], [1, "#b2182b"]]
COLOURS = ("against an even spread", "mass")
SHORT = {
    "total_variation": "total variation", "jensen_shannon": "Jensen-Shannon", "entropy": "entropy",
    "distance": "distance", "previous": "previous token", "first": "first token",
}  # fmt: skip
DASHES = {"standard": "solid", "reciprocal": "dash"}
MEANING = (
    "The standard path is softmax(Q·K), the reciprocal path softmax(K·Q), both causal and of the same projections; "
    "a layer uses one of them or a mix. In a fixed layer the other path is what exchanging W_Q and W_K would give. "
    "One text is one sample: differences between runs are not evidence by themselves."
)


def page(seen: Sequence[Seen], text_seen: Text) -> str:
    """attention.html of one or several runs on one text."""
    names = [run_name(one) for one in seen]
    variants = list(dict.fromkeys(one.run.variant for one in seen))
    figures: dict[str, Figure] = {"layers": by_layer(seen, variants)}
    about = f"{len(text_seen.ids):,} tokens: {text_seen.source}"
    body = [
        f"<header><h1>{html.escape(' | '.join(names))}</h1><p>Where attention goes · {html.escape(about)}</p></header>",
        f"<p>{html.escape(MEANING)}</p>",
        f"<p>{html.escape(ONE_CLASS)}</p>" if len(variants) > 1 else "",
        legend(variants) if len(seen) > 1 else "",
        "<h2>Layer by layer</h2>",
        plot("layers", figures["layers"], "Mean over a layer's heads and over the positions behind the first. "
             "Where each path has its own number, solid is the standard path and dashed the reciprocal one."),
        "<h2>Early against late layers</h2>",
        _halves(seen, variants),
    ]  # fmt: skip
    body += _pictures(seen, text_seen, figures)
    for one in seen:
        body += _numbers(one)
    notes = [f"<li>{html.escape(f'{one.run.name}: {note}')}</li>" for one in seen for note in one.run.notes]
    body += [f"<h2>Notes</h2><ul>{''.join(notes)}</ul>"] if notes else []
    return whole_page(f"Attention of {' | '.join(names)}", "\n".join(body), figures)


def run_name(one: Seen) -> str:
    return f"{one.run.name} at iteration {one.run.iteration:,}"


def by_layer(seen: Sequence[Seen], variants: list[str]) -> Figure:
    """A line a run and path against the layer; the statistic is chosen on the page."""
    data: list[dict[str, Any]] = []
    options: list[dict[str, Any]] = [
        {"name": SHORT[name], "data": [], "layout": {"yaxis": {"title": {"text": title}}}}
        for name, (title, _) in STATISTICS.items()
    ]
    for one in seen:
        for path in PATHS:
            ink = colour(one.run.variant, variants)
            data.append({
                "type": "scatter", "mode": "lines+markers", "name": f"{text(one.run.name)}, {path}",
                "x": list(one.layers), "y": [], "line": {"color": ink, "width": 2, "dash": DASHES[path]},
                "marker": {"size": 6}, "meta": {"variant": text(one.run.variant)},
            })  # fmt: skip
            for option, (name, (_, own)) in zip(options, STATISTICS.items(), strict=True):
                shown = own or path == PATHS[0]
                values = [_short(value) for value in layer_means(one, name, path).values()]
                option["data"].append({"y": values if shown else []})
    return {
        "data": data,
        "layout": {
            "height": 380,
            "margin": {"l": 66, "r": 24, "t": 12, "b": 48},
            "xaxis": {"title": {"text": "layer"}, "dtick": 1},
            "yaxis": {"rangemode": "tozero"},
        },
        "narrow": {"margin": {"l": 50, "r": 12}, "height": 320},
        "choices": [{"label": "Statistic", "options": options}],
    }


def _short(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def _halves(seen: Sequence[Seen], variants: list[str]) -> str:
    """A row a run, statistic and path."""
    rows = []
    for one in seen:
        mark = f"{swatch(one.run.variant, variants)}, seed {one.run.seed}"
        for name, (title, own) in STATISTICS.items():
            for path in PATHS if own else PATHS[:1]:
                numbers = [_number(value) for value in halves(one, name, path)]
                rows.append([mark, f"{title}, {path}" if own else title, *numbers])
    return table(["run", "", "early", "late"], rows, (1,))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _numbers(one: Seen) -> list[str]:
    """The run's table, a row a layer, behind a fold."""
    headings, rows = ["layer", "uses"], []
    for title, own in STATISTICS.values():
        headings += (
            [f"{title.partition(' (')[0]}, {path}" for path in PATHS] if own else [title.partition(" (")[0]]
        )
    means = {(name, path): layer_means(one, name, path) for name in STATISTICS for path in PATHS}
    for layer in one.layers:
        cells = [
            _number(means[name, path][layer])
            for name, (_, own) in STATISTICS.items()
            for path in (PATHS if own else PATHS[:1])
        ]
        rows.append([str(layer), used_path(one.run.reciprocal[layer]), *cells])
    return [
        f"<details><summary>{html.escape(one.run.name)} in numbers</summary>",
        table([html.escape(heading) for heading in headings], rows),
        "</details>",
    ]


def _pictures(seen: Sequence[Seen], text_seen: Text, figures: dict[str, Figure]) -> list[str]:
    """A figure for each chosen layer and head: a row a run, the standard path beside the reciprocal one."""
    body, even = [], even_spread(len(text_seen.ids))
    for layer in sorted({layer for one in seen for layer in one.layers}):
        with_it = [one for one in seen if layer in one.layers]
        for head in sorted({head for one in with_it for head in one.layers[layer].pictures}):
            drawn = [one for one in with_it if head in one.layers[layer].pictures]
            name = f"map{layer}-{head}"
            reach = span([path for one in drawn for path in one.layers[layer].pictures[head]], even)
            figures[name] = picture(drawn, layer, head, text_seen, even, reach)
            uses = "; ".join(f"{one.run.name} uses {used_path(one.run.reciprocal[layer])}" for one in drawn)
            body.append(
                plot(
                    name,
                    figures[name],
                    html.escape(f"Layer {layer}, head {head}. {uses}. Colours reach a factor of {2**reach}."),
                )
            )
    if not body:
        return []
    told = (
        "A row is a query position, a column a key position at or before it. Against an even spread, blue is less mass "
        "than every position alike would get and red is more; as mass, dark is "
        f"{FLOOR:g} or less and bright is all of it, on a logarithmic scale. Long texts are shown in blocks of tokens."
    )
    return ["<h2>Pictures</h2>", f"<p>{told}</p>", *body]


def picture(seen: Sequence[Seen], layer: int, head: int, text_seen: Text, even: Tensor, reach: int) -> Figure:
    """Heat maps side by side; queries downwards, keys to the right."""
    count = len(text_seen.ids)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"height": (SIDE + GAP) * len(seen) + 20, "annotations": []}
    layout["margin"] = {"l": 56, "r": 12, "t": 8, "b": 24}
    high = 1 / len(seen)
    options: list[dict[str, Any]] = [{"name": name, "data": []} for name in COLOURS]
    for row, one in enumerate(seen):
        pair = one.layers[layer].pictures[head]
        for column, path in enumerate(PATHS):
            number = 2 * row + column + 1
            suffix = "" if number == 1 else str(number)
            bottom, left = 1 - (row + 1) * high, 0.53 * column
            top = bottom + high * SIDE / (SIDE + GAP)
            side = pair[column].shape[0]
            at = [int(n * count / side) for n in range(side)]
            colours = _colours(pair[column], even, reach)
            data.append(_heat(pair[column], at, text_seen, suffix) | colours[0])
            for option, own in zip(options, colours, strict=True):
                option["data"].append(own)
            axis = {"showgrid": False, "zeroline": False, "constrain": "domain"}
            layout[f"xaxis{suffix}"] = axis | {
                "domain": [left, left + 0.47],
                "anchor": f"y{suffix}",
                "nticks": 6,
            }
            layout[f"yaxis{suffix}"] = axis | {
                "domain": [bottom, top], "anchor": f"x{suffix}", "autorange": "reversed", "nticks": 6,
                "scaleanchor": f"x{suffix}",
            }  # fmt: skip
            share = one.run.reciprocal[layer]
            mark = " (used)" if share is not None and share == float(column) else ""
            layout["annotations"].append({
                "text": f"{text(one.run.name)}: {path}{mark}", "xref": "paper", "yref": "paper", "x": left + 0.235,
                "xanchor": "center", "y": top, "yanchor": "bottom", "showarrow": False, "yshift": 6,
            })  # fmt: skip
    return {
        "data": data,
        "layout": layout,
        "narrow": {"font": {"size": 10}, "margin": {"l": 36, "r": 4}},
        "choices": [{"label": "Colour", "options": options}],
    }


def _heat(masses: Tensor, at: list[int], text_seen: Text, suffix: str) -> dict[str, Any]:
    """The axes and what the pointer tells; the colours are those of `_colours`."""
    side = masses.shape[0]
    trace: dict[str, Any] = {
        "type": "heatmap", "x": at, "y": at, "xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "showscale": False,
        "hoverongaps": False, "hovertemplate": "query %{y}, key %{x}: %{z}<extra></extra>",
    }  # fmt: skip
    if len(text_seen.ids) <= READABLE:
        pieces = [text(piece) or "·" for piece in text_seen.pieces()]
        trace["text"] = [
            [f"{pieces[i]} → {pieces[j]}" if j <= i else "" for j in range(side)] for i in range(side)
        ]
        trace["hovertemplate"] = "%{text}: %{z}<extra></extra>"
    return trace


def even_spread(tokens: int) -> Tensor:
    """The picture (N, N) of attention that gives every position before it the same."""
    nothing_HTD = torch.zeros(1, tokens, 1)
    return maps.measure(nothing_HTD, nothing_HTD, [0]).pictures[0][0]


def ratios(masses: Tensor, even: Tensor) -> Tensor:
    """Mass against an even spread in powers of two; the future, where both are nothing, is 0."""
    return (masses.clamp(min=1e-30) / even.clamp(min=1e-30)).log2()


def span(pictures: Sequence[Tensor], even: Tensor) -> int:
    """How many powers of two the colours need for all but a hundredth of the pixels."""
    past = torch.ones_like(even).tril().bool()
    values = torch.cat([ratios(masses, even)[past] for masses in pictures]).abs().sort().values
    needed = math.ceil(float(values[int(0.99 * (len(values) - 1))]))
    return min(max(needed, SPANS[0]), SPANS[1])


def _colours(masses: Tensor, even: Tensor, reach: int) -> list[dict[str, Any]]:
    """For each of COLOURS the values and their scale; nothing above the diagonal, which is the future."""
    ratio, mass = ratios(masses, even).clamp(-2 * SPANS[1], 2 * SPANS[1]), masses.clamp(min=FLOOR).log10()
    return [
        {"z": _lower(ratio), "zmin": -reach, "zmax": reach, "colorscale": DIVERGING},
        {"z": _lower(mass), "zmin": math.log10(FLOOR), "zmax": 0, "colorscale": "Viridis"},
    ]


def _lower(values: Tensor) -> list[list[float | None]]:
    rows: list[list[float]] = values.tolist()
    return [
        [round(value, 2) if j <= i else None for j, value in enumerate(row)] for i, row in enumerate(rows)
    ]
