"""The curves of a study as figures: loss over training, and the probabilities of a learned variant.

Each function gives a figure for plotly (plain data), or None where the records hold nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from referee.pages.figures import Plain, axis, band, figure, line
from study.arm_colors import color, palette_index
from study.curves import Curve, Probabilities

SYMBOLS = (
    "circle", "square", "diamond", "triangle-up", "cross", "star", "x", "pentagon", "hexagon", "bowtie"
)  # fmt: skip
MARGIN = (62, 96, 12, 48)
SCALES = [{"name": f"{kind} axis", "layout": {"xaxis": {"type": kind}}} for kind in ("linear", "log")]
COINCIDE = 0.01  # of the vertical axis
NARROW = {"margin": {"l": 60, "r": 78}, "font": {"size": 11}, "height": 330}


def time_unit(seconds: float) -> tuple[float, str]:
    """(seconds of a unit, its name) for an axis that ends at `seconds`."""
    for size, name in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 3 * size:
            return size, name
    return 1.0, "seconds"


def rounded(values: Sequence[float], digits: int = 6) -> list[float]:
    """To so many significant digits, which is more than a figure shows."""
    return [float(f"{value:.{digits}g}") for value in values]


def variant_line(variant: str, variants: Sequence[str], size: int | None, **attributes: Any) -> Plain:
    """The variant's line with its name at the end. size: of its markers, a second sign beside its color."""
    symbol = SYMBOLS[palette_index(variant, variants) % len(SYMBOLS)]
    attributes |= {"marker": {"symbol": symbol, "size": size}} if size else {}
    return line(variant, color(variant, variants), variant, label=variant, **attributes)


def loss_curves(curves: list[Curve], tokens_per_update: int | None, what: str, markers: bool) -> Plain | None:
    """Mean loss of each variant with the range of its seeds, against tokens, training time or updates."""
    curves = [curve for curve in curves if curve.tokens]
    if not curves:
        return None
    variants = [curve.variant for curve in curves]
    # a variant's band, where it has one, lies behind its line
    drawn = [
        (curve, is_band) for curve in curves for is_band in ((True, False) if curve.seeds > 1 else (False,))
    ]
    data = [
        band(f"{curve.variant}, lowest to highest seed", color(curve.variant, variants), 0.14, curve.variant)
        if is_band
        else variant_line(curve.variant, variants, 6 if markers else None)
        for curve, is_band in drawn
    ]
    choices = [
        {"label": "Horizontal axis", "options": _across(drawn, tokens_per_update)},
        {"label": "Vertical axis", "options": _upwards(drawn, what)},
        {"label": "Horizontal scale", "options": SCALES},
    ]
    return figure(data, 420, MARGIN, NARROW, choices, yaxis={"nticks": 7})


def coinciding(curves: Sequence[Curve]) -> str:
    """A sentence on the curves that coincide at the scale of the figure; "" where there are none.

    They lie within COINCIDE of the vertical axis from the first curve, at every point that both have.
    """
    first = next((curve for curve in curves if curve.tokens), None)
    if first is None:
        return ""
    every = [loss for curve in curves for loss in curve.loss]
    near = COINCIDE * (max(every) - min(every))
    at = dict(zip(first.tokens, first.loss, strict=True))
    names = [
        curve.variant
        for curve in curves
        if (gaps := [abs(at[x] - y) for x, y in zip(curve.tokens, curve.loss, strict=True) if x in at])
        and max(gaps) <= near
    ]
    if len(names) < 2:
        return ""
    return f" The curves of {', '.join(names[:-1])} and {names[-1]} coincide at this scale and look like one."


def _across(drawn: list[tuple[Curve, bool]], tokens_per_update: int | None) -> list[Plain]:
    """The same curves against tokens, training time and, where a batch is known, updates."""
    unit, name = time_unit(max(curve.seconds[-1] for curve, _ in drawn))
    each = tokens_per_update or 1
    rows: list[tuple[str, str, str, str, Callable[[Curve], list[float]]]] = [
        ("tokens", "tokens", "~s", "%{x:.4s} tokens", lambda curve: curve.tokens),
        ("training time", f"training time ({name})", "", f"%{{x:.2f}} {name}",
         lambda curve: [value / unit for value in curve.seconds]),
        ("updates", "updates", "~s", "update %{x:,.0f}", lambda curve: [value / each for value in curve.tokens]),
    ]  # fmt: skip
    options = []
    for option, title, ticks, hover, values in rows if tokens_per_update else rows[:2]:
        forward = [rounded(values(curve)) for curve, _ in drawn]
        data = [{"x": x + x[::-1] if is_band else x, "hovertemplate": f"%{{y:.5g}} at {hover}"}
                for x, (_, is_band) in zip(forward, drawn, strict=True)]  # fmt: skip
        options.append({"name": option, "data": data, "layout": {"xaxis": axis(title, tickformat=ticks)}})
    return options


def _upwards(drawn: list[tuple[Curve, bool]], what: str) -> list[Plain]:
    """Perplexity on a logarithmic axis, on which its curve has the shape of the loss, and the loss itself."""
    losses = [curve.high + curve.low[::-1] if is_band else curve.loss for curve, is_band in drawn]
    perplexities = [[math.exp(min(value, 300.0)) for value in loss] for loss in losses]
    wide = max(map(max, losses)) - min(map(min, losses)) > math.log(8)
    # D2: ticks at 1, 2 and 5 of each decade
    logarithmic = axis(f"{what} perplexity", type="log", tickformat="~s", dtick="D2" if wide else None)
    linear = axis(f"{what} loss (nats)", type="linear", tickformat="", dtick=None)
    return [
        {"name": name, "data": [{"y": rounded(value)} for value in values], "layout": {"yaxis": vertical}}
        for name, values, vertical in (("perplexity", perplexities, logarithmic), ("loss", losses, linear))
    ]


def alternation(found: Probabilities) -> Plain:
    """The probability of the reciprocal path in each layer as training goes on."""
    last = max(1, len(found.layers[0]) - 1)
    data = [
        line(
            f"layer {layer}",
            shade(layer / last),
            found.variant,
            label=f"layer {layer}",
            marker={"size": 5},
            x=found.tokens,
            y=rounded(values, 5),
            hovertemplate="%{y:.3f} at %{x:.4s} tokens",
        )
        for layer, values in enumerate(zip(*found.layers, strict=True))
    ]
    half = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0.5, "y1": 0.5}
    half["line"] = {"color": "var(--noise)", "width": 1, "dash": "dot"}
    across = axis("tokens", tickformat="~s")
    upwards = axis("probability of the reciprocal path", nticks=7)
    return figure(data, 380, MARGIN, NARROW, xaxis=across, yaxis=upwards, shapes=[half])


def shade(share: float) -> str:
    """A color between blue (0, the first layer) and orange (1, the last) of the page's palette."""
    return f"mix(--v1, --v5, {share:.3g})"
