"""The figures of a report: curves over training, learned probabilities, final differences, as plotly's plain data."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from ra.arms import controls_of
from referee.pages.figures import Estimate, Plain, axis, band, faded, figure, line, points
from referee.pages.markup import escape_html
from referee.verdict.statistics import Interval, mean, noise_floor, perplexity_percent
from study.analysis.verdict import Losses, control_losses, noise_band
from study.arm_colors import color, palette_index
from study.curves import Curve, Probabilities
from study.report.report_data import Report

SYMBOLS = (
    "circle", "square", "diamond", "triangle-up", "cross", "star", "x", "pentagon", "hexagon", "bowtie"
)  # fmt: skip
MARGIN = (62, 96, 12, 48)
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


def variant_line(variant: str, variants: Sequence[str], **attributes: Any) -> Plain:
    """The variant's line with its name at the end. Its markers are a second sign besides its color."""
    marker = {"symbol": SYMBOLS[palette_index(variant, variants) % len(SYMBOLS)], "size": 6}
    return line(variant, color(variant, variants), variant, label=variant, marker=marker, **attributes)


def loss_curves(curves: list[Curve]) -> Plain | None:
    """Mean validation perplexity of each variant with the range of its seeds, against tokens or training time."""
    curves = [curve for curve in curves if curve.tokens]
    if not curves:
        return None
    variants = [curve.variant for curve in curves]
    unit, name = time_unit(max(curve.seconds[-1] for curve in curves))
    data: list[Plain] = []
    tokens: list[Plain] = []  # the values of the horizontal axis, by option
    times: list[Plain] = []
    for curve in curves:
        seconds = [value / unit for value in curve.seconds]
        if curve.seeds > 1:  # the band lies behind the line
            about = f"{curve.variant}, lowest to highest seed"
            edges = _perplexities(curve.high + curve.low[::-1])
            data.append(band(about, color(curve.variant, variants), 0.14, curve.variant, y=edges))
            tokens.append({"x": rounded(curve.tokens + curve.tokens[::-1])})
            times.append({"x": rounded(seconds + seconds[::-1])})
        data.append(variant_line(curve.variant, variants, y=_perplexities(curve.loss)))
        tokens.append({"x": rounded(curve.tokens), "hovertemplate": "%{y:.5g} at %{x:.4s} tokens"})
        times.append({"x": rounded(seconds), "hovertemplate": f"%{{y:.5g}} at %{{x:.2f}} {name}"})
    options = [
        {"name": "tokens", "data": tokens, "layout": {"xaxis": axis("tokens", tickformat="~s")}},
        {
            "name": "training time",
            "data": times,
            "layout": {"xaxis": axis(f"training time ({name})", tickformat="")},
        },
    ]
    losses = [loss for curve in curves for loss in curve.low + curve.high]
    ticks = "D2" if max(losses) - min(losses) > math.log(8) else None  # at 1, 2 and 5 of each decade
    upwards = axis("validation perplexity", type="log", tickformat="~s", dtick=ticks, nticks=7)
    choices = [{"label": "Horizontal axis", "options": options}]
    return figure(data, 420, MARGIN, NARROW, choices, yaxis=upwards)


def _perplexities(losses: Sequence[float]) -> list[float]:
    return rounded([math.exp(min(loss, 300.0)) for loss in losses])


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


ROW = 38  # pixels of one line of an interval plot
NARROW_COLUMN = {"margin": {"l": 78, "r": 12}, "font": {"size": 11}}


def _rows(labels: Sequence[str]) -> Plain:
    """A vertical axis with labels at 0, -1, -2, ... from the top."""
    ticks = {"tickvals": [-place for place in range(len(labels))], "ticktext": list(labels)}
    return ticks | {
        "showgrid": False,
        "zeroline": False,
        "range": [0.6 - len(labels), 0.6],
        "fixedrange": True,
        "automargin": "left",
    }


def _upright(kind: str, left: float, right: float, **style: object) -> Plain:
    """A shape over the whole height."""
    return {"type": kind, "x0": left, "x1": right, "yref": "paper", "y0": 0, "y1": 1} | style


def in_percent(interval: Interval) -> Estimate:
    """A difference of losses with its bounds, as changes of perplexity in percent."""
    low, high = (None if end is None else perplexity_percent(end) for end in (interval.low, interval.high))
    return perplexity_percent(interval.mean), low, high


def differences(report: Report) -> Plain | None:
    """Final differences to the control arms in percent of perplexity, and the margin of equivalence in grey."""
    rows = sorted(report.rows, key=lambda row: row.control)  # real changes first
    lines = [(row.variant, row.against_controls) for row in rows if row.against_controls]
    if not lines:
        return None
    data, ends = [], [0.0]
    for place, (name, interval) in enumerate(lines):
        estimate = middle, low, high = in_percent(interval)
        ends += filter(None, estimate)
        bounds = "one seed: no interval" if low is None else f"[{low:+.3f} %, {high:+.3f} %]"
        ink, hover = color(name, report.variants), f"{middle:+.3f} % {bounds}"
        data.append(points(name, ink, [estimate], [-place], "circle", group=name, hovertemplate=hover))
    shapes = [_upright("line", 0, 0, line={"color": "var(--soft)", "width": 1})]
    if report.verdicts:
        limit = report.verdicts[0].margin
        equivalent = perplexity_percent(-limit), perplexity_percent(limit)
        grey = faded("var(--noise)", 0.16)
        shapes.insert(0, _upright("rect", *equivalent, fillcolor=grey, line={"width": 0}, layer="below"))
        if equivalent[1] < 2 * max(map(abs, ends)):  # else the estimates would be too small to see
            ends += equivalent
    margin = 0.06 * (max(ends) - min(ends)) or 1.0
    reach = [min(ends) - margin, max(ends) + margin]
    return figure(
        data,
        90 + ROW * len(lines),
        (150, 24, 12, 52),
        NARROW_COLUMN | {"margin": {"l": 122, "r": 12}},
        xaxis=axis("% of perplexity (lower is better)", zeroline=False, range=reach),
        yaxis=_rows([escape_html(name) for name, _ in lines]),
        shapes=shapes,
    )


def over_training(report: Report, places: Sequence[int]) -> Plain | None:
    """Each variant's difference to the mean of the control arms during training, with their noise.

    places: the tokens at which every counted run was evaluated. Means are over the seeds that all variants have.
    None where there is nothing to compare.
    """
    by_run = {(run.variant, run.seed): run.values for run in report.runs if run.used}
    names = [name for name in report.variants if controls_of(name, report.variants)]
    every = [{seed for name, seed in by_run if name == variant and seed is not None} for variant in names]
    seeds = sorted(set.intersection(*every)) if places and every else []
    if not seeds or len(names) < 2:
        return None
    tables = [{name: {seed: by_run[name, seed][at] for seed in seeds} for name in names} for at in places]
    data = []
    if halves := _noise(tables):
        edges = [perplexity_percent(half) for half in halves + [-half for half in reversed(halves)]]
        around = [*places, *reversed(places)]
        data.append(band("noise", "var(--noise)", 0.16, x=around, y=rounded(edges)))

    @functools.cache
    def centres(controls: tuple[str, ...]) -> list[float]:
        return [mean(list(map(mean, control_losses(table, controls=controls)))) for table in tables]

    for name in names:
        means = [mean(list(table[name].values())) for table in tables]
        centre = centres(tuple(controls_of(name, names)))
        percents = [perplexity_percent(loss - other) for loss, other in zip(means, centre, strict=True)]
        hover = "%{y:+.3f} % at %{x:.4s} tokens"
        data.append(variant_line(name, names, x=list(places), y=rounded(percents), hovertemplate=hover))
    across, upwards = axis("tokens", tickformat="~s"), axis("% of perplexity", zeroline=True, nticks=7)
    return figure(data, 380, MARGIN, NARROW, xaxis=across, yaxis=upwards)


def _noise(tables: Sequence[Losses]) -> list[float]:
    """At each place half the width (nats) of the band that holds a variant without effect; empty without a floor."""
    halves = []
    for table in tables:
        arms = control_losses(table)
        floor = noise_floor(arms)
        if floor is None:
            return []
        halves.append(noise_band(floor, list(map(len, arms))))
    return halves
