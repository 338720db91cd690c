"""Draw changes of perplexity and differences of training losses for plotly."""

from __future__ import annotations

from typing import Any

from pages.components import color
from pages.markup import escape_figure
from study.compare.alignment import TOLERANCE, Alignment
from study.compare.build import StudyComparison
from study.records.runs import BASELINE
from study.stats.statistics import Interval, perplexity_percent

# In the order of the studies. The variants' own colors mean variants on every page.
STUDY_COLORS = ("var(--accent)", "var(--bad)", "var(--v8)", "var(--v6)", "var(--v7)", "var(--v9)")
NARROW = {"margin": {"l": 50, "r": 20}, "font": {"size": 11}, "height": 330}


def _percent(value: float) -> float:
    """A difference of losses as a change of perplexity in percent, rounded for a figure."""
    return float(f"{perplexity_percent(value):.6g}")


def changes(comparison: StudyComparison) -> dict[str, Any] | None:
    """Change of perplexity: one row for each variant, one point with its interval for each study."""
    labels = [study.label for study in comparison.studies]
    rows: list[tuple[str, list[Interval | None]]]
    if comparison.absolute:
        rows = [(row.variant, [*row.differences]) for row in comparison.absolute]
        series, what = [f"{label} against {labels[0]}" for label in labels[1:]], f"change to {labels[0]}"
    else:
        rows = [(row.variant, list(row.against_baseline)) for row in comparison.relative]
        series, what = labels, f"change to the study's {BASELINE}"
    if not rows:
        return None
    data = []
    for place, name in enumerate(series):
        points = [(variant, found[place]) for variant, found in rows if found[place] is not None]
        data.append(_points(name, points, STUDY_COLORS[place % len(STUDY_COLORS)]))
    names = [escape_figure(variant) for variant, _ in rows][::-1]
    return {
        "data": data,
        "layout": {
            "height": 140 + 44 * len(rows),
            "margin": {"l": 130, "r": 24, "t": 34, "b": 48},
            "showlegend": True,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            "scattermode": "group",
            "xaxis": {"title": {"text": f"{escape_figure(what)}, % of perplexity (left is better)"}, "zeroline": True,
                      "zerolinewidth": 2},
            "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": names},
        },
        "narrow": NARROW | {"margin": {"l": 16 + 7 * max(map(len, names)), "r": 12, "t": 34},
                            "height": 150 + 44 * len(rows),
                            "xaxis": {"title": {"text": "change, % of perplexity"}}},
    }  # fmt: skip


def _points(name: str, points: list[tuple[str, Interval | None]], ink: str) -> dict[str, Any]:
    found = [(variant, interval) for variant, interval in points if interval is not None]
    middle = [_percent(interval.mean) for _, interval in found]

    def arm(interval: Interval, end: float | None, sign: int) -> float | None:
        return None if end is None else sign * (_percent(end) - _percent(interval.mean))

    return {
        "type": "scatter",
        "mode": "markers",
        "orientation": "h",
        "name": escape_figure(name),
        "x": middle,
        "y": [escape_figure(variant) for variant, _ in found],
        "error_x": {
            "type": "data", "symmetric": False, "color": ink, "thickness": 1.5, "width": 5,
            "visible": any(interval.low is not None for _, interval in found),
            "array": [arm(interval, interval.high, 1) for _, interval in found],
            "arrayminus": [arm(interval, interval.low, -1) for _, interval in found],
        },
        "marker": {
            "size": 10, "color": ink, "line": {"width": 2, "color": ink},
            "symbol": ["circle-open" if interval.low is None else "circle" for _, interval in found],
        },
        "hovertemplate": "%{y}: %{x:+.3g} %<extra>" + escape_figure(name) + "</extra>",
    }  # fmt: skip


def curves(lines: list[Alignment], variants: list[str]) -> dict[str, Any]:
    """Relative difference of losses in percent against iteration, one line for each run, on a logarithmic axis."""
    data: list[dict[str, Any]] = []
    last = max(line.iterations for line in lines)
    for line in lines:
        ink = color(line.variant, variants)
        data.append(_curve(line.curve, {"color": ink, "width": 1.6}, escape_figure(line.run), line.variant))
    for seed in sorted({line.seed for line in lines}):
        envelope = next(line.envelope_curve for line in lines if line.seed == seed)
        if envelope:
            noise = {"color": "var(--noise)", "width": 1.4, "dash": "dot"}
            data.append(_curve(envelope, noise, f"control arms, seed {seed}", None))
    rule = {"color": "var(--ink)", "width": 1.2, "dash": "dash"}
    data.append(_curve({1: TOLERANCE, last: TOLERANCE}, rule, "one percent", None))
    return {
        "data": data,
        "layout": {
            "height": 400,
            "margin": {"l": 66, "r": 24, "t": 12, "b": 48},
            "hovermode": "closest",
            "xaxis": {"title": {"text": "iteration"}, "exponentformat": "SI", "minexponent": 4},
            "yaxis": {"title": {"text": "difference of the loss, %"}, "type": "log", "nticks": 7},
        },
        "narrow": NARROW,
    }


def _curve(points: dict[int, float], ink: dict[str, Any], name: str, variant: str | None) -> dict[str, Any]:
    """One line. A zero leaves a gap: a logarithmic axis cannot show it."""
    places = sorted(points)
    trace = {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": places,
        "y": [float(f"{100 * points[k]:.4g}") if points[k] > 0 else None for k in places],
        "line": ink,
        "hovertemplate": "iteration %{x}: %{y:.3g} %<extra>" + name + "</extra>",
    }
    return trace if variant is None else trace | {"meta": {"variant": escape_figure(variant)}}
