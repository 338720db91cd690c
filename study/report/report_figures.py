"""The figures of a report: curves over training, learned probabilities, final differences, as plotly's plain data."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
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
            f"mix(--v1, --v5, {layer / last:.3g})",  # from blue, the first layer, to orange, the last
            found.variant,
            label=f"layer {layer}",
            marker={"size": 5},
            x=found.tokens,
            y=rounded(values, 5),
            hovertemplate="%{y:.3f} at %{x:.4s} tokens",
        )
        for layer, values in enumerate(zip(*found.layers, strict=True))
    ]
    across = axis("tokens", tickformat="~s")
    upwards = axis("probability of the reciprocal path", nticks=7)
    return figure(data, 380, MARGIN, NARROW, xaxis=across, yaxis=upwards)


ROW = 38  # pixels of one row of a forest plot, at least


@dataclass(frozen=True)
class Mark:
    """An estimate of a forest plot: a difference of losses in a row. group: its name in the page's legend."""

    row: str
    series: str
    ink: str
    difference: Interval
    group: str = ""


def in_percent(interval: Interval) -> Estimate:
    """A difference of losses with its bounds, as changes of perplexity in percent."""
    low, high = (None if end is None else perplexity_percent(end) for end in (interval.low, interval.high))
    return perplexity_percent(interval.mean), low, high


def forest(marks: Sequence[Mark], margin: float | None = None) -> Plain | None:
    """Differences in percent of perplexity with their intervals, a row each; an open circle is one seed.

    margin: of equivalence (nats), in grey. Several series of a row lie below each other, each in its color.
    """
    rows = list(dict.fromkeys(mark.row for mark in marks))
    series = list(dict.fromkeys(mark.series for mark in marks))
    shared = len(rows) < len(marks)  # a row has several series
    named = any(mark.series != mark.row for mark in marks)
    data, ends = [], [0.0]
    for number, name in enumerate(series):
        own = [mark for mark in marks if mark.series == name]
        estimates = [in_percent(mark.difference) for mark in own]
        below = (number - (len(series) - 1) / 2) * 0.7 / len(series) if shared else 0.0
        data.append(
            points(
                name,
                own[0].ink,
                estimates,
                [-rows.index(mark.row) - below for mark in own],
                ["circle-open" if low is None else "circle" for _, low, _ in estimates],
                group=own[0].group,
                text=[_hover(name, estimate) for estimate in estimates],
                hovertemplate="%{text}<extra></extra>",
            )
        )
        ends += [end for estimate in estimates for end in estimate if end is not None]
    if not data:
        return None
    shapes = [_upright("line", 0, 0, line={"color": "var(--soft)", "width": 1})]
    if margin is not None:
        equivalent = perplexity_percent(-margin), perplexity_percent(margin)
        grey = faded("var(--noise)", 0.16)
        shapes.insert(0, _upright("rect", *equivalent, fillcolor=grey, line={"width": 0}, layer="below"))
        if equivalent[1] < 2 * max(map(abs, ends)):  # else the estimates would be too small to see
            ends += equivalent
    space = 0.06 * (max(ends) - min(ends)) or 1.0
    ticks = {"tickvals": [-place for place in range(len(rows))], "ticktext": [*map(escape_html, rows)]}
    fixed = {"showgrid": False, "zeroline": False, "fixedrange": True, "automargin": "left"}
    return figure(
        data,
        90 + 22 * named + max(ROW, 20 * len(series) * shared) * len(rows),
        (150, 24, 12 + 22 * named, 52),
        {"font": {"size": 11}, "margin": {"l": 122, "r": 12}},
        xaxis=axis(
            "% of perplexity (lower is better)", zeroline=False, range=[min(ends) - space, max(ends) + space]
        ),
        yaxis=ticks | fixed | {"range": [0.6 - len(rows), 0.6]},
        shapes=shapes,
        showlegend=named,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    )


def _upright(kind: str, left: float, right: float, **style: object) -> Plain:
    """A shape over the whole height."""
    return {"type": kind, "x0": left, "x1": right, "yref": "paper", "y0": 0, "y1": 1} | style


def _hover(name: str, estimate: Estimate) -> str:
    middle, low, high = estimate
    bounds = "one seed: no interval" if low is None else f"[{low:+.3f} %, {high:+.3f} %]"
    return f"{escape_html(name)}: {middle:+.3f} % {bounds}"


def differences(report: Report) -> Plain | None:
    """Final differences to the control arms, and the margin of equivalence."""
    rows = sorted(report.rows, key=lambda row: row.control)  # real changes first
    marks = [
        Mark(row.variant, row.variant, color(row.variant, report.variants), row.against_controls, row.variant)
        for row in rows
        if row.against_controls
    ]
    return forest(marks, report.verdicts[0].margin if report.verdicts else None)


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
