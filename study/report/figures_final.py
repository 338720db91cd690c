"""The final numbers of a study as figures: differences with their intervals, HellaSwag, speed and memory.

Each function gives a figure for plotly (plain data), or None where the records hold nothing to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pages.components import color
from pages.markup import escape_figure
from study.records.hellaswag_scores import CHANCE
from study.records.runs import BASELINE
from study.report.build import Report
from study.stats.statistics import Interval, perplexity_percent

ROW = 38  # pixels of one line of an interval plot


def _interval(
    name: str, interval: Interval, place: float, variants: Sequence[str], hollow: bool, what: str
) -> dict[str, Any]:
    """One estimate as a marker with its interval; none where there is one seed."""
    ink = color(name, variants)
    middle = perplexity_percent(interval.mean)
    trace: dict[str, Any] = {
        "type": "scatter", "mode": "markers", "x": [middle], "y": [place], "name": escape_figure(name),
        "marker": {"symbol": "diamond" if hollow else "circle", "size": 10, "color": ink,
                   "line": {"color": ink, "width": 2}},
        "meta": {"variant": escape_figure(name)},
    }  # fmt: skip
    bounds = "one seed: no interval"
    if interval.low is not None and interval.high is not None:
        low, high = perplexity_percent(interval.low), perplexity_percent(interval.high)
        trace["error_x"] = {"type": "data", "symmetric": False, "array": [high - middle], "arrayminus": [middle - low],
                            "color": ink, "thickness": 2, "width": 5}  # fmt: skip
        bounds = f"[{low:+.3f} %, {high:+.3f} %]"
    trace["hovertemplate"] = f"{middle:+.3f} % {bounds}<br>{what}"
    return trace


def differences(report: Report) -> dict[str, Any] | None:
    """Final differences in percent of perplexity: real changes against the control arms, and all paired with B."""
    variants = [row.variant for row in report.rows]
    rows = sorted(report.rows, key=lambda row: row.control)  # real changes first
    lines = [(seen.variant, seen.test.difference, True, "against control arms") for seen in report.verdicts]
    lines += [
        (row.variant, row.against_baseline, False, f"paired with {BASELINE}")
        for row in rows
        if row.against_baseline
    ]
    if not lines:
        return None
    data, ticks = [], []
    for place, (name, interval, hollow, what) in enumerate(lines):
        data.append(_interval(name, interval, -place, variants, hollow, what))
        ticks.append(f"{escape_figure(name)}<br><span style='font-size:10px'>{what}</span>")
    shapes: list[dict[str, Any]] = [
        {
            "type": "line",
            "x0": 0,
            "x1": 0,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"color": "var(--soft)", "width": 1},
        }
    ]
    band = report.noise
    if band is not None:
        shapes.insert(0, {"type": "rect", "x0": perplexity_percent(-band),
                          "x1": perplexity_percent(band), "yref": "paper", "y0": 0, "y1": 1,
                          "fillcolor": "var(--noise, 0.16)", "line": {"width": 0}, "layer": "below"})  # fmt: skip
    return {
        "data": data,
        "layout": {
            "height": 90 + ROW * len(lines),
            "margin": {"l": 150, "r": 24, "t": 12, "b": 52},
            "hovermode": "closest",
            "xaxis": {"title": {"text": "% of perplexity (lower is better)"}, "zeroline": False,
                      "range": _reach(data, band)},
            "yaxis": {"tickvals": [-place for place in range(len(lines))], "ticktext": ticks, "showgrid": False,
                      "zeroline": False, "range": [0.6 - len(lines), 0.6], "fixedrange": True},
            "shapes": shapes,
        },
        "narrow": {"margin": {"l": 122, "r": 12}, "font": {"size": 11}},
        "choices": [],
    }  # fmt: skip


def _reach(data: list[dict[str, Any]], band: float | None) -> list[float]:
    """What the axis shows: every estimate with its interval, zero, and the noise unless it dwarfs them."""
    ends = [0.0, *(trace["x"][0] for trace in data)]
    for trace in data:
        error = trace.get("error_x")
        if error:
            ends += [trace["x"][0] + error["array"][0], trace["x"][0] - error["arrayminus"][0]]
    if band is not None and perplexity_percent(band) < 2 * max(abs(end) for end in ends):
        ends += [perplexity_percent(band), perplexity_percent(-band)]
    low, high = min(ends), max(ends)
    margin = 0.06 * (high - low) or 1.0
    return [low - margin, high + margin]


def hellaswag(report: Report) -> dict[str, Any] | None:
    """Accuracies with one standard error of the items, and chance."""
    rows = [row for row in report.rows if row.hellaswag.acc is not None]
    if not rows:
        return None
    variants = [row.variant for row in report.rows]
    data = []
    for place, row in enumerate(rows):
        seen, ink = row.hellaswag, color(row.variant, variants)
        for shift, key, rate, error in (
            (0.14, "acc", seen.acc, seen.acc_stderr),
            (-0.14, "acc_norm", seen.acc_norm, seen.acc_norm_stderr),
        ):
            if rate is None:
                continue
            data.append({
                "type": "scatter", "mode": "markers", "x": [100 * rate], "y": [-place + shift],
                "name": f"{escape_figure(row.variant)} {key}", "meta": {"variant": escape_figure(row.variant)},
                "marker": {"symbol": "circle" if key == "acc" else "circle-open", "size": 9, "color": ink,
                           "line": {"width": 2, "color": ink}},
                "error_x": {"type": "data", "array": [100 * (error or 0.0)], "color": ink, "thickness": 2, "width": 4},
                "hovertemplate": f"{key} {100 * rate:.2f} ± {100 * (error or 0.0):.2f} %",
            })  # fmt: skip
    return {
        "data": data,
        "layout": {
            "height": 96 + ROW * len(rows),
            "margin": {"l": 96, "r": 24, "t": 26, "b": 52},
            "hovermode": "closest",
            "xaxis": {"title": {"text": "% of items right"}, "zeroline": False, "nticks": 8},
            "yaxis": {"tickvals": [-place for place in range(len(rows))],
                      "ticktext": [escape_figure(row.variant) for row in rows], "showgrid": False,
                      "zeroline": False, "range": [0.6 - len(rows), 0.6], "fixedrange": True},
            "shapes": [{"type": "line", "x0": 100 * CHANCE, "x1": 100 * CHANCE, "yref": "paper", "y0": 0, "y1": 1,
                        "line": {"color": "var(--bad)", "width": 1.5, "dash": "dash"}}],
            "annotations": [{"x": 100 * CHANCE, "y": 1, "yref": "paper", "yanchor": "bottom", "text": "chance, 25 %",
                             "showarrow": False, "font": {"size": 11, "color": "var(--bad)"}}],
        },
        "narrow": {"margin": {"l": 78, "r": 12}, "font": {"size": 11}},
        "choices": [],
    }  # fmt: skip


def cost(report: Report) -> dict[str, Any] | None:
    """Tokens a second and peak memory of each variant, as bars from zero: two panels, one choice of variants."""
    speed = [(row.variant, row.tokens_per_second) for row in report.rows if row.tokens_per_second]
    memory = [(row.variant, row.peak_memory_bytes / 2**30) for row in report.rows if row.peak_memory_bytes]
    if not speed and not memory:
        return None
    variants = [row.variant for row in report.rows]
    names = [escape_figure(name) for name in variants][::-1]
    data = []
    for values, axis, shape in ((speed, "", ",.0f"), (memory, "2", ",.2f")):
        for name, value in values:
            ink = color(name, variants)
            data.append({
                "type": "bar", "orientation": "h", "x": [value], "y": [escape_figure(name)],
                "name": escape_figure(name),
                "xaxis": f"x{axis}", "yaxis": "y", "marker": {"color": ink}, "width": 0.55,
                "text": [format(value, shape)], "textposition": "auto", "cliponaxis": False,
                "meta": {"variant": escape_figure(name)}, "hovertemplate": f"%{{x:{shape}}}",
            })  # fmt: skip
    return {
        "data": data,
        "layout": {
            "height": 100 + ROW * len(names),
            "margin": {"l": 96, "r": 24, "t": 12, "b": 52},
            "hovermode": "closest",
            "barmode": "overlay",
            "uniformtext": {"minsize": 10, "mode": "show"},
            "xaxis": {"domain": [0, 0.47], "title": {"text": "tokens a second"}, "rangemode": "tozero", "nticks": 5,
                      "tickformat": "~s"},
            "xaxis2": {"domain": [0.53, 1], "title": {"text": "peak memory (GiB)"}, "rangemode": "tozero", "nticks": 5},
            "yaxis": {"categoryorder": "array", "categoryarray": names, "showgrid": False, "fixedrange": True},
        },
        "narrow": {"margin": {"l": 78, "r": 12}, "font": {"size": 11}},
        "choices": [],
    }  # fmt: skip
