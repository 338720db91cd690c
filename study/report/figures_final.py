"""The final numbers of a study as figures: differences with their intervals, tasks of four endings, speed and memory.

Each function gives a figure for plotly (plain data), or None where the records hold nothing to draw.
"""

from __future__ import annotations

from collections.abc import Sequence

from referee.pages.figures import Estimate, Plain, axis, faded, figure, points, trace
from referee.pages.markup import escape_html
from referee.verdict.statistics import Interval, perplexity_percent
from study.arm_colors import color
from study.hellaswag_scores import CHANCE, EndingsTask
from study.report.report_data import Report

ROW = 38  # pixels of one line of an interval plot
NARROW = {"margin": {"l": 78, "r": 12}, "font": {"size": 11}}


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
        NARROW | {"margin": {"l": 122, "r": 12}},
        xaxis=axis("% of perplexity (lower is better)", zeroline=False, range=reach),
        yaxis=_rows([escape_html(name) for name, _ in lines]),
        shapes=shapes,
    )


def endings(report: Report, task: EndingsTask) -> Plain | None:
    """Accuracies on a task with one standard error of the items, and chance."""
    rows = [row for row in report.rows if getattr(row, task.key).acc is not None]
    if not rows:
        return None
    data = []
    for place, row in enumerate(rows):
        score, ink = getattr(row, task.key), color(row.variant, report.variants)
        for key, y, symbol in zip(
            task.measures, (0.14 - place, -0.14 - place), ("circle", "circle-open"), strict=False
        ):
            x, half = 100 * (getattr(score, key) or 0.0), 100 * (getattr(score, f"{key}_stderr") or 0.0)
            name, hover = f"{row.variant} {key}", f"{key} {x:.2f} ± {half:.2f} %"
            estimates = [(x, x - half, x + half)]
            data.append(points(name, ink, estimates, [y], symbol, group=row.variant, hovertemplate=hover))
    chance, red = 100 * CHANCE, "var(--bad)"
    label = {
        "x": chance,
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "text": "chance, 25 %",
        "showarrow": False,
    }
    return figure(
        data,
        96 + ROW * len(rows),
        (96, 24, 26, 52),
        NARROW,
        xaxis=axis("% of items right", zeroline=False, nticks=8),
        yaxis=_rows([escape_html(row.variant) for row in rows]),
        shapes=[_upright("line", chance, chance, line={"color": red, "width": 1.5, "dash": "dash"})],
        annotations=[label | {"font": {"size": 11, "color": red}}],
    )


def cost(report: Report) -> Plain | None:
    """Tokens a second and peak memory of each variant, as bars from zero: two panels, one choice of variants."""
    speed = [(row.variant, row.tokens_per_second) for row in report.rows if row.tokens_per_second]
    memory = [(row.variant, row.peak_memory_bytes / 2**30) for row in report.rows if row.peak_memory_bytes]
    if not speed and not memory:
        return None
    data = [
        trace(
            name,
            name,
            type="bar",
            orientation="h",
            x=[value],
            y=[escape_html(name)],
            xaxis=across,
            yaxis="y",
            width=0.55,
            marker={"color": color(name, report.variants)},
            text=[format(value, shape)],
            textposition="auto",
            cliponaxis=False,
            hovertemplate=f"%{{x:{shape}}}",
        )
        for values, across, shape in ((speed, "x", ",.0f"), (memory, "x2", ",.2f"))
        for name, value in values
    ]
    names = [escape_html(name) for name in reversed(report.variants)]
    panel = {"rangemode": "tozero", "nticks": 5}
    return figure(
        data,
        100 + ROW * len(names),
        (96, 24, 12, 52),
        NARROW,
        barmode="overlay",
        uniformtext={"minsize": 10, "mode": "show"},
        xaxis=axis("tokens a second", domain=[0, 0.47], tickformat="~s", **panel),
        xaxis2=axis("peak memory (GiB)", domain=[0.53, 1], **panel),
        yaxis={
            "categoryorder": "array",
            "categoryarray": names,
            "showgrid": False,
            "fixedrange": True,
            "automargin": "left",
        },
    )
