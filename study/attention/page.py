"""What the attentions look at, for a reader: statistics by layer, then pictures of the chosen heads of both paths.

A page of its own, or the section of a study's report. Needs no torch.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from pages.html import Figure, Place, bullets, colour, legend, note, plot, section, swatch, table, text
from pages.html import page as whole_page
from ra.names import ONE_CLASS
from study.attention.data import PATHS, STATISTICS, Look, Text, halves, keys, layer_means, used_path
from study.attention.figures import ABOUT_MASS, ABOUT_PICTURES, one_by_one, picture, places

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


def page(seen: Sequence[Look], text_seen: Text) -> str:
    """attention.html of one or several runs on one text."""
    names = [run_name(one) for one in seen]
    variants = list(dict.fromkeys(one.variant for one in seen))
    figures: dict[str, Figure] = {"layers": by_layer(seen, variants)}
    about = f"{text_seen.tokens:,} tokens: {text_seen.source}"
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
    notes = [f"<li>{html.escape(f'{one.run}: {note}')}</li>" for one in seen for note in one.notes]
    body += [f"<h2>Notes</h2><ul>{''.join(notes)}</ul>"] if notes else []
    return whole_page(f"Attention of {' | '.join(names)}", "\n".join(body), figures)


def run_name(one: Look) -> str:
    return f"{one.run} at iteration {one.iteration:,}"


def by_layer(seen: Sequence[Look], variants: list[str]) -> Figure:
    """A line a run and path against the layer; the statistic is chosen on the page."""
    data: list[dict[str, Any]] = []
    options: list[dict[str, Any]] = [
        {"name": SHORT[name], "data": [], "layout": {"yaxis": {"title": {"text": title}}}}
        for name, (title, _) in STATISTICS.items()
    ]
    for one in seen:
        for path in PATHS:
            ink = colour(one.variant, variants)
            data.append({
                "type": "scatter", "mode": "lines+markers", "name": f"{text(one.run)}, {path}",
                "x": list(one.layers), "y": [], "line": {"color": ink, "width": 2, "dash": DASHES[path]},
                "marker": {"size": 6},
                "meta": {"variant": text(one.variant), "label": text(one.variant) if path == PATHS[0] else ""},
            })  # fmt: skip
            for option, (name, (_, own)) in zip(options, STATISTICS.items(), strict=True):
                shown = own or path == PATHS[0]
                values = [_short(value) for value in layer_means(one, name, path).values()]
                option["data"].append({"y": values if shown else []})
    return {
        "data": data,
        "layout": {
            "height": 380,
            "margin": {"l": 66, "r": 84, "t": 12, "b": 48},
            "xaxis": {"title": {"text": "layer"}, "dtick": 1},
            "yaxis": {"rangemode": "tozero"},
        },
        "narrow": {"margin": {"l": 62, "r": 74}, "height": 320},
        "choices": [{"label": "Statistic", "options": options}],
        "labelled": True,
    }


def _short(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def _halves(seen: Sequence[Look], variants: list[str]) -> str:
    """A row a run, statistic and path."""
    rows = []
    for one in seen:
        mark = f"{swatch(one.variant, variants)}, seed {one.seed}"
        for name, path in keys():
            title, own = STATISTICS[name]
            numbers = [_number(value) for value in halves(one, name, path)]
            rows.append([mark, f"{title}, {path}" if own else title, *numbers])
    return table(["run", "", "early", "late"], rows, (1,))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _numbers(one: Look) -> list[str]:
    """The run's table, a row a layer, behind a fold."""
    headings, columns = ["layer", "uses"], []
    for name, path in keys():
        title, own = STATISTICS[name]
        headings.append(html.escape(title.partition(" (")[0] + (f", {path}" if own else "")))
        columns.append(layer_means(one, name, path))
    rows = [
        [str(number), used_path(layer.share), *(_number(column[number]) for column in columns)]
        for number, layer in one.layers.items()
    ]
    summary = f"<summary>{html.escape(one.run)} in numbers</summary>"
    return ["<details>" + summary, table(headings, rows), "</details>"]


def _pictures(seen: Sequence[Look], text_seen: Text, figures: dict[str, Figure]) -> list[str]:
    """A figure for each chosen layer and head: a row a run, the standard path beside the reciprocal one."""
    body = []
    for (layer, head), drawn in places(seen).items():
        name = f"map{layer}-{head}"
        figures[name], reach = picture(drawn, layer, head, text_seen)
        uses = "; ".join(f"{one.run} uses {used_path(one.layers[layer].share)}" for one in drawn)
        told = f"Layer {layer}, head {head}. {uses}. Colours reach a factor of {2**reach}."
        body.append(plot(name, figures[name], html.escape(told)))
    return ["<h2>Pictures</h2>", f"<p>{ABOUT_PICTURES} {ABOUT_MASS}</p>", *body] if body else []


# ---- the section of a study's report


def report_section(looks: Sequence[Look], text_seen: Text, names: Sequence[str], figure: Place) -> str:
    """Layer by layer, early against late, and the first and last layer's pictures, a variant at a time."""
    if not looks:
        return ""
    seeds = " and ".join(str(seed) for seed in sorted({one.seed for one in looks}))
    of = f"Each variant's run of seed {seeds}, on {text_seen.tokens:,} tokens: {text_seen.source}."
    maps = []
    for number, ((layer, head), drawn) in enumerate(places(looks).items()):
        made = one_by_one(drawn, layer, head, text_seen)
        maps.append(figure(f"attention-map{number}", made, f"Layer {layer}, head {head}."))
    return section(
        "Where attention goes",
        f"<p>{html.escape(MEANING)} {html.escape(of)}</p>",
        figure("attention-layers", by_layer(looks, list(names)),
               "Mean over a layer's heads. Solid: the standard path; dashed: the reciprocal one."),
        "<h3>Early against late layers</h3>",
        "<details><summary>means over the early and over the late layers</summary>"
        + _halves(looks, list(names)) + "</details>",
        f"<h3>Pictures</h3><p>{ABOUT_PICTURES}</p>" if maps else "",
        *maps,
        bullets([f"{text(one.run)}: {text(line)}" for one in looks for line in one.notes]),
        note("Other runs, layers, heads and texts: <code>make attention RUN=results/STUDY/runs/NAME</code>."),
    )  # fmt: skip
