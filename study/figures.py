"""The curves of a study as figures: loss over training, differences and ranks over training, alternation.

Each function gives a figure of `study.html` (plain data), or None where the records hold nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from study.curves import Curve, Probabilities
from study.html import Figure, colour, text
from study.report import Report, is_equivalent
from study.runs import Run, losses
from study.statistics import CONFIDENCE, mean, noise_floor, t_quantile

SYMBOLS = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "cross",
    "star",
    "x",
    "pentagon",
    "hexagon",
    "bowtie",
)
MARGIN = {"l": 62, "r": 96, "t": 12, "b": 48}
NARROW = {"margin": {"l": 50, "r": 78}, "font": {"size": 11}, "height": 330}


def figures_of_time(seconds: float) -> tuple[float, str]:
    """(what to divide seconds by, the unit's name) for an axis that ends at `seconds`."""
    for size, name in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 3 * size:
            return size, name
    return 1.0, "seconds"


def symbol(variant: str, variants: Sequence[str]) -> str:
    """The variant's marker: a second sign beside its colour."""
    return SYMBOLS[int(colour(variant, variants).strip("var(-)")) % len(SYMBOLS)]


def rounded(values: Sequence[float], digits: int = 6) -> list[float]:
    """To so many significant digits, which is more than a figure shows."""
    return [float(f"{value:.{digits}g}") for value in values]


def loss_curves(
    curves: list[Curve], tokens_per_update: int | None, what: str, markers: bool
) -> Figure | None:
    """Mean loss of each variant with the range of its seeds, against tokens, training time or updates."""
    curves = [curve for curve in curves if curve.tokens]
    if not curves:
        return None
    variants = [curve.variant for curve in curves]
    unit, unit_name = figures_of_time(max(curve.seconds[-1] for curve in curves))
    data: list[dict[str, Any]] = []
    axes: dict[str, list[Any]] = {"tokens": [], "training time": [], "updates": []}
    levels: dict[str, list[Any]] = {"perplexity": [], "loss": []}
    for curve in curves:
        forward = {
            "tokens": curve.tokens,
            "training time": [value / unit for value in curve.seconds],
            "updates": [value / tokens_per_update for value in curve.tokens] if tokens_per_update else [],
        }
        traces = [_line(curve, variants, markers)]
        if curve.seeds > 1:
            traces = [_band(curve, variants), *traces]
        for trace in traces:
            there_and_back = "fill" in trace
            for name, along in axes.items():
                x = rounded(forward[name])
                along.append({"x": x + x[::-1] if there_and_back else x})
            loss = curve.high + curve.low[::-1] if there_and_back else curve.loss
            levels["loss"].append({"y": rounded(loss)})
            levels["perplexity"].append({"y": rounded([math.exp(min(value, 300.0)) for value in loss])})
        data += traces
    titles = {"tokens": "tokens", "training time": f"training time ({unit_name})", "updates": "updates"}
    across = [
        {"name": name, "data": axes[name], "layout": {"xaxis": {"title": {"text": titles[name]}}}}
        for name in axes
        if name != "updates" or tokens_per_update
    ]
    upwards = [
        {"name": "perplexity", "data": levels["perplexity"],
         "layout": {"yaxis": {"type": "log", "tickformat": "~s", "title": {"text": f"{what} perplexity"}}}},
        {"name": "loss", "data": levels["loss"],
         "layout": {"yaxis": {"type": "linear", "tickformat": "", "title": {"text": f"{what} loss (nats)"}}}},
    ]  # fmt: skip
    scales = [{"name": f"{kind} axis", "layout": {"xaxis": {"type": kind}}} for kind in ("linear", "log")]
    return {
        "data": data,
        "layout": {
            "height": 420,
            "margin": MARGIN,
            "hovermode": "closest",
            "xaxis": {"tickformat": "~s"},
            "yaxis": {"nticks": 7},
        },
        "narrow": NARROW,
        "labelled": True,
        "choices": [
            {"label": "Horizontal axis", "options": across},
            {"label": "Vertical axis", "options": upwards},
            {"label": "Horizontal scale", "options": scales},
        ],
    }


def _line(curve: Curve, variants: Sequence[str], markers: bool) -> dict[str, Any]:
    name = text(curve.variant)
    return {
        "type": "scatter",
        "mode": "lines+markers" if markers else "lines",
        "name": name,
        "line": {"color": colour(curve.variant, variants), "width": 2},
        "marker": {"symbol": symbol(curve.variant, variants), "size": 6},
        "meta": {"variant": name, "label": name},
        "hovertemplate": "%{y:.5g} at %{x:.4s}",
    }


def _band(curve: Curve, variants: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{text(curve.variant)}, lowest to highest seed",
        "fill": "toself",
        "fillcolor": colour(curve.variant, variants, 0.14),
        "line": {"width": 0, "color": colour(curve.variant, variants, 0.0)},
        "hoverinfo": "skip",
        "meta": {"variant": text(curve.variant)},
    }


def _table_at(used: Sequence[Run], tokens: int) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for run in used:
        if run.seed is not None:
            found.setdefault(run.variant, {})[run.seed] = losses(run.record)[tokens]
    return found


def _common(table: dict[str, dict[int, float]]) -> list[int]:
    """The seeds that every variant has."""
    return sorted(set.intersection(*(set(own) for own in table.values()))) if table else []


def over_training(report: Report, places: Sequence[int]) -> Figure | None:
    """Each variant's difference to the mean of the equivalent arms as training goes on, with their noise; and ranks.

    places: the tokens at which every counted run was evaluated. Means are over the seeds that all variants have.
    """
    used = [run for run in report.runs if run.used]
    tables = [_table_at(used, tokens) for tokens in places]
    seeds = _common(tables[0]) if tables else []
    variants = [row.variant for row in report.rows]
    arms = [name for name in variants if is_equivalent(name)]
    if not seeds or len(variants) < 2 or not arms:
        return None
    means = [{name: mean([table[name][seed] for seed in seeds]) for name in variants} for table in tables]
    centre = [mean([at[name] for name in arms]) for at in means]
    ranks = [sorted(variants, key=at.__getitem__) for at in means]
    x = list(places)
    data: list[dict[str, Any]] = []
    differing: list[dict[str, Any]] = []
    ranked: list[dict[str, Any]] = []
    halves = [_noise(table, arms, seeds) for table in tables]
    if len(arms) > 1 and all(half is not None for half in halves):
        width = [100 * math.expm1(half or 0.0) for half in halves]
        low = [100 * math.expm1(-(half or 0.0)) for half in halves]
        data.append({
            "type": "scatter", "mode": "lines", "fill": "toself", "fillcolor": "var(--noise, 0.16)",
            "line": {"width": 0, "color": "var(--noise, 0)"}, "x": x + x[::-1], "hoverinfo": "skip", "name": "noise",
        })  # fmt: skip
        differing.append({"y": rounded(width + low[::-1])})
        ranked.append({"x": [], "y": []})
    for name in variants:
        shown = text(name)
        data.append({
            "type": "scatter", "mode": "lines+markers", "name": shown, "x": x,
            "line": {"color": colour(name, variants), "width": 2},
            "marker": {"symbol": symbol(name, variants), "size": 7},
            "meta": {"variant": shown, "label": shown},
        })  # fmt: skip
        change = [
            100 * math.expm1(min(at[name] - middle, 300.0)) for at, middle in zip(means, centre, strict=True)
        ]
        differing.append({"y": rounded(change), "hovertemplate": "%{y:+.3f} % at %{x:.4s} tokens"})
        ranked.append({"y": [order.index(name) + 1 for order in ranks],
                       "hovertemplate": "rank %{y} at %{x:.4s} tokens"})  # fmt: skip
    upright = {"title": {"text": "% of perplexity"}, "zeroline": True, "nticks": 7}
    options = [{"name": "difference", "data": differing, "layout": {"yaxis": upright}}]
    if len(seeds) > 1:
        ladder = {"title": {"text": "rank (1 is best)"}, "dtick": 1, "range": [len(variants) + 0.5, 0.5]}
        options.append({"name": "rank", "data": ranked, "layout": {"yaxis": ladder}})
    scales = [{"name": f"{kind} axis", "layout": {"xaxis": {"type": kind}}} for kind in ("linear", "log")]
    choices = [{"label": "What", "options": options}] if len(options) > 1 else []
    if not choices:
        data = [{**trace, **patch} for trace, patch in zip(data, differing, strict=True)]
    layout = {
        "height": 380,
        "margin": MARGIN,
        "xaxis": {"title": {"text": "tokens"}, "tickformat": "~s"},
        "yaxis": {} if choices else upright,
    }
    return {
        "data": data,
        "layout": layout,
        "narrow": NARROW,
        "labelled": True,
        "choices": [*choices, {"label": "Horizontal scale", "options": scales}],
    }


def _noise(table: dict[str, dict[int, float]], arms: list[str], seeds: list[int]) -> float | None:
    """Half the width (nats) of the band that holds an equivalent arm's mean difference in 95 % of studies."""
    floor = noise_floor([list(dict.fromkeys(table[name][seed] for name in arms)) for seed in seeds])
    if floor is None:
        return None
    error = floor.sigma * math.sqrt((1 - 1 / len(arms)) / len(seeds))
    return min(t_quantile(CONFIDENCE, floor.freedom) * error, 100.0)


def alternation(found: Probabilities) -> Figure:
    """The probability of the reciprocal path in each layer as training goes on."""
    count = len(found.layers[0])
    data = []
    for layer in range(count):
        share = layer / max(1, count - 1)
        data.append({
            "type": "scatter", "mode": "lines+markers", "name": f"layer {layer}", "x": found.tokens,
            "y": rounded([layers[layer] for layers in found.layers], 5),
            "line": {"color": shade(share), "width": 2}, "marker": {"size": 5},
            "meta": {"variant": text(found.variant), "label": f"layer {layer}"},
            "hovertemplate": "%{y:.3f} at %{x:.4s} tokens",
        })  # fmt: skip
    return {
        "data": data,
        "layout": {
            "height": 380,
            "margin": MARGIN,
            "xaxis": {"title": {"text": "tokens"}, "tickformat": "~s"},
            "yaxis": {"title": {"text": "probability of the reciprocal path"}, "nticks": 7},
            "shapes": [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0.5, "y1": 0.5,
                        "line": {"color": "var(--noise)", "width": 1, "dash": "dot"}}],
        },
        "narrow": NARROW,
        "labelled": True,
        "choices": [],
    }  # fmt: skip


def shade(share: float) -> str:
    """A colour between blue (0, the first layer) and orange (1, the last), readable on light and on dark."""
    ends = ((45, 110, 200), (120, 110, 160), (215, 105, 40))
    place = min(1.999, max(0.0, 2 * share))
    low, high, part = ends[int(place)], ends[int(place) + 1], place - int(place)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(low, high, strict=True))
