"""The curves of a study as figures: loss over training, and what a learned variant has learned.

Each function gives a figure for plotly (plain data), or None where the records hold nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pages.components import color, palette_index
from pages.markup import escape_figure
from study.records.curves import Curve, Probabilities

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
SCALES = [{"name": f"{kind} axis", "layout": {"xaxis": {"type": kind}}} for kind in ("linear", "log")]
COINCIDE = 0.01  # of the vertical axis
NARROW = {"margin": {"l": 60, "r": 78}, "font": {"size": 11}, "height": 330}


def figures_of_time(seconds: float) -> tuple[float, str]:
    """(what to divide seconds by, the unit's name) for an axis that ends at `seconds`."""
    for size, name in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 3 * size:
            return size, name
    return 1.0, "seconds"


def symbol(variant: str, variants: Sequence[str]) -> str:
    """The variant's marker: a second sign beside its colour."""
    return SYMBOLS[palette_index(variant, variants) % len(SYMBOLS)]


def rounded(values: Sequence[float], digits: int = 6) -> list[float]:
    """To so many significant digits, which is more than a figure shows."""
    return [float(f"{value:.{digits}g}") for value in values]


def loss_curves(
    curves: list[Curve], tokens_per_update: int | None, what: str, markers: bool
) -> dict[str, Any] | None:
    """Mean loss of each variant with the range of its seeds, against tokens, training time or updates."""
    curves = [curve for curve in curves if curve.tokens]
    if not curves:
        return None
    variants = [curve.variant for curve in curves]
    # a variant's band, where it has one, lies behind its line
    drawn = [(curve, band) for curve in curves for band in ((True, False) if curve.seeds > 1 else (False,))]
    return {
        "data": [
            _band(curve, variants) if band else _line(curve, variants, markers) for curve, band in drawn
        ],
        "layout": {
            "height": 420,
            "margin": MARGIN,
            "hovermode": "closest",
            "xaxis": {},
            "yaxis": {"nticks": 7},
        },
        "narrow": NARROW,
        "labelled": True,
        "choices": [
            {"label": "Horizontal axis", "options": _across(drawn, tokens_per_update)},
            {"label": "Vertical axis", "options": _upwards(drawn, what)},
            {"label": "Horizontal scale", "options": SCALES},
        ],
    }


def coinciding(curves: Sequence[Curve]) -> str:
    """A sentence on the curves that cannot be told apart at the scale of the figure; "" where there are none.

    They lie within COINCIDE of the vertical axis from the first curve, at every point that both have.
    """
    first = next((curve for curve in curves if curve.tokens), None)
    if first is None:
        return ""
    every = [loss for curve in curves for loss in curve.loss]
    near = COINCIDE * (max(every) - min(every))
    at = dict(zip(first.tokens, first.loss, strict=True))
    names = [
        escape_figure(curve.variant)
        for curve in curves
        if (gaps := [abs(at[x] - y) for x, y in zip(curve.tokens, curve.loss, strict=True) if x in at])
        and max(gaps) <= near
    ]
    if len(names) < 2:
        return ""
    return f" The curves of {', '.join(names[:-1])} and {names[-1]} coincide at this scale and look like one."


def _across(drawn: list[tuple[Curve, bool]], tokens_per_update: int | None) -> list[dict[str, Any]]:
    """The same curves against tokens, training time and, where a batch is known, updates."""
    unit, name = figures_of_time(max(curve.seconds[-1] for curve, _ in drawn))
    each = tokens_per_update or 0
    rows: list[tuple[str, str, str, str, Callable[[Curve], list[float]]]] = [
        ("tokens", "tokens", "~s", "%{x:.4s} tokens", lambda curve: curve.tokens),
        ("training time", f"training time ({name})", "", f"%{{x:.2f}} {name}",
         lambda curve: [value / unit for value in curve.seconds]),
        ("updates", "updates", "~s", "update %{x:,.0f}", lambda curve: [value / each for value in curve.tokens]),
    ]  # fmt: skip
    options = []
    for option, title, ticks, hover, values in rows if each else rows[:2]:
        forward = [rounded(values(curve)) for curve, _ in drawn]
        data = [{"x": x + x[::-1] if band else x, "hovertemplate": f"%{{y:.5g}} at {hover}"}
                for x, (_, band) in zip(forward, drawn, strict=True)]  # fmt: skip
        layout = {"xaxis": {"title": {"text": title}, "tickformat": ticks}}
        options.append({"name": option, "data": data, "layout": layout})
    return options


def _upwards(drawn: list[tuple[Curve, bool]], what: str) -> list[dict[str, Any]]:
    """Perplexity on a logarithmic axis, on which its curve has the shape of the loss, and the loss itself."""
    losses = [curve.high + curve.low[::-1] if band else curve.loss for curve, band in drawn]
    perplexities = [[math.exp(min(value, 300.0)) for value in loss] for loss in losses]
    wide = max(map(max, losses)) - min(map(min, losses)) > math.log(8)
    ticks = {"tickformat": "~s", "dtick": "D2" if wide else None}  # D2: at 1, 2 and 5 of each decade
    return [
        {
            "name": name,
            "data": [{"y": rounded(value)} for value in values],
            "layout": {"yaxis": axis | {"title": {"text": f"{what} {title}"}}},
        }
        for name, values, axis, title in (
            ("perplexity", perplexities, {"type": "log", **ticks}, "perplexity"),
            ("loss", losses, {"type": "linear", "tickformat": "", "dtick": None}, "loss (nats)"),
        )
    ]


def _line(curve: Curve, variants: Sequence[str], markers: bool) -> dict[str, Any]:
    name = escape_figure(curve.variant)
    return {
        "type": "scatter",
        "mode": "lines+markers" if markers else "lines",
        "name": name,
        "line": {"color": color(curve.variant, variants), "width": 2},
        "marker": {"symbol": symbol(curve.variant, variants), "size": 6},
        "meta": {"variant": name, "label": name},
    }


def _band(curve: Curve, variants: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{escape_figure(curve.variant)}, lowest to highest seed",
        "fill": "toself",
        "fillcolor": color(curve.variant, variants, 0.14),
        "line": {"width": 0, "color": color(curve.variant, variants, 0.0)},
        "hoverinfo": "skip",
        "meta": {"variant": escape_figure(curve.variant)},
    }


def alternation(found: Probabilities) -> dict[str, Any]:
    """The probability of the reciprocal path in each layer as training goes on."""
    count = len(found.layers[0])
    data = []
    for layer in range(count):
        share = layer / max(1, count - 1)
        data.append({
            "type": "scatter", "mode": "lines+markers", "name": f"layer {layer}", "x": found.tokens,
            "y": rounded([layers[layer] for layers in found.layers], 5),
            "line": {"color": shade(share), "width": 2}, "marker": {"size": 5},
            "meta": {"variant": escape_figure(found.variant), "label": f"layer {layer}"},
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
