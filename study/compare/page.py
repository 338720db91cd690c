"""A comparison as a page: the same sentences and tables as compare.md, with two figures. Needs no torch."""

from __future__ import annotations

import html
import re
from typing import Any

from pages.html import Figure, colour, legend, plot, table, text
from pages.html import page as whole_page
from study.compare.alignment import RULE, Alignment
from study.compare.build import Comparison
from study.compare.checklist import EQUAL, FATAL, HARMLESS, NOT_RECORDED
from study.compare.markdown import (
    ACROSS,
    ALIGNMENT,
    RANKING,
    Table,
    across_table,
    alignment_table,
    main_table,
    pairs,
    ranking_table,
)
from study.compare.sentences import above_table, counts, order_note, ranking_note, sentences
from study.records.runs import BASELINE
from study.report.markdown import plain
from study.stats.statistics import Interval, perplexity_percent

# Of the studies, in their order; the variants' own colours mean variants on every page.
STUDY_COLOURS = ("var(--accent)", "var(--bad)", "var(--v8)", "var(--v6)", "var(--v7)", "var(--v9)")
STATUS = {  # as it stands in the checklist: what forbids the comparison stands out
    HARMLESS: HARMLESS,
    NOT_RECORDED: NOT_RECORDED,
    FATAL: f'<strong style="color:var(--bad)">{FATAL}</strong>',
}
NARROW = {"margin": {"l": 50, "r": 20}, "font": {"size": 11}, "height": 330}


def rich(sentence: str) -> str:
    """A Markdown sentence of study.report.sentences as HTML: its marks gone, its bold kept, its texts escaped."""
    parts = re.split(r"\*\*(.+?)\*\*", sentence)
    return "".join(
        f"<strong>{html.escape(plain(part))}</strong>" if place % 2 else html.escape(plain(part))
        for place, part in enumerate(parts)
    )


def html_table(content: Table) -> str:
    """A table of numbers; what stands behind one (its interval, what it allows one to say) is below it."""
    headings, rows = content
    return table([rich(cell) for cell in headings], [[_stacked(cell) for cell in row] for row in rows])


def _stacked(cell: str) -> str:
    found = re.fullmatch(r"([-+]?[\d.,e+]+(?: %)?) (\\?[\[(].*)", cell)
    return f"{rich(found[1])}<small>{rich(found[2])}</small>" if found else rich(cell)


def page(comparison: Comparison) -> str:
    """compare.html."""
    names = " | ".join(html.escape(study.label) for study in comparison.studies)
    figures: dict[str, Figure] = {}
    body = [f"<header><h1>{names}</h1><p>Studies side by side</p></header>", _verdicts(comparison)]
    if comparison.checks:
        body += _main(comparison, figures)
        body += _checklist(comparison)
        body += _alignments(comparison, figures)
        body += _orders(comparison)
    body += _runs(comparison)
    return whole_page(" | ".join(study.label for study in comparison.studies), "\n".join(body), figures)


def _verdicts(comparison: Comparison) -> str:
    lines = "".join(f"<li>{rich(line)}</li>" for line in sentences(comparison))
    return f'<ul class="verdicts">{lines}</ul>'


def _main(comparison: Comparison, figures: dict[str, Figure]) -> list[str]:
    title = "At equal tokens" if comparison.absolute else f"Against each study's own {BASELINE}"
    body = [f"<h2>{html.escape(title)}</h2>", f"<p>{rich(above_table(comparison))}</p>"]
    drawn = changes(comparison)
    if drawn:
        figures["changes"] = drawn
        caption = "Change of perplexity with its 95 % interval; a point without one is a single seed, and no evidence."
        body.append(plot("changes", drawn, caption))
    return [*body, html_table(main_table(comparison))]


def _checklist(comparison: Comparison) -> list[str]:
    """What differs, with its meaning below the status; what is equal behind a fold."""
    labels = [html.escape(study.label) for study in comparison.studies]
    prose = tuple(range(1, 2 + len(labels)))
    differing, equal = [], []
    worst_first = (FATAL, NOT_RECORDED, HARMLESS, EQUAL)
    for check in sorted(
        comparison.checks, key=lambda check: (worst_first.index(check.status), not check.blocks)
    ):
        values = [html.escape(value) for value in check.values]
        if check.status == EQUAL:
            equal.append([html.escape(check.subject), *values])
        else:
            reason = f"<small>{html.escape(check.reason)}</small>"
            differing.append([html.escape(check.subject), STATUS[check.status] + reason, *values])
    body = ["<h2>Checklist</h2>", f"<p>{html.escape(counts(comparison))}.</p>"]
    if differing:
        body.append(table(["must agree", "", *labels], differing, prose))
    if equal:
        body.append(f"<details><summary>{len(equal)} rows that are equal</summary>")
        body += [table(["agrees", *labels], equal, prose[:-1]), "</details>"]
    return body


def _alignments(comparison: Comparison, figures: dict[str, Figure]) -> list[str]:
    if not comparison.alignments:
        return []
    body = ["<h2>Do the curves coincide?</h2>", f"<p>{rich(ALIGNMENT)}</p>"]
    variants = list(dict.fromkeys(line.variant for line in comparison.alignments))
    body.append(f"<div>{legend(variants)}</div>")
    for number, (names, lines) in enumerate(pairs(comparison)):
        figures[f"curves{number}"] = curves(lines, variants)
        caption = (
            f"{rich(names)}: relative difference of the training losses of the same run, running mean. Dashed: one "
            "percent. Dotted: the largest difference between two control arms of one study at the same seed."
        )
        body += [plot(f"curves{number}", figures[f"curves{number}"], caption)]
        body.append(f"<details><summary>{len(lines)} runs in numbers</summary>")
        body += [html_table(alignment_table(lines)), "</details>"]
    return body


def _orders(comparison: Comparison) -> list[str]:
    body = ["<h2>Order of the variants</h2>", f"<p>{rich(RANKING)}</p>"]
    body.append(f"<p>{rich(order_note(comparison))}</p>")
    if any(ranking.places for ranking in comparison.rankings) and comparison.across:
        body += [f"<p>{rich(ACROSS)}</p>", html_table(across_table(comparison))]
    for ranking in comparison.rankings:
        body.append(f"<p>{rich(ranking_note(ranking))}</p>")
        body += [html_table(ranking_table(ranking))] if ranking.places else []
    return body


def _runs(comparison: Comparison) -> list[str]:
    rows = [
        [html.escape(study.label), html.escape(run.name), html.escape(run.status), html.escape(run.why_not)]
        for study in comparison.studies
        for run in study.report.runs
        if not run.used
    ]
    body = ["<h2>Runs that are not counted</h2>"]
    every = "<p>None: every run counts.</p>"
    body.append(table(["study", "run", "status", "why"], rows, (0, 1, 2, 3)) if rows else every)
    notes = [f"{study.label}: {note}" for study in comparison.studies for note in study.notes]
    if notes:
        listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
        body.append(f"<h2>Notes</h2><ul>{listed}</ul>")
    return body


def _percent(value: float) -> float:
    """A difference of losses as a change of perplexity in percent, to what a figure shows."""
    return float(f"{perplexity_percent(value):.6g}")


def changes(comparison: Comparison) -> Figure | None:
    """A row a variant, a point a study: its change of perplexity, with the interval where there is one."""
    labels = [study.label for study in comparison.studies]
    rows: list[tuple[str, list[Interval | None]]]
    if comparison.absolute:
        rows = [(row.variant, [*row.differences]) for row in comparison.absolute]
        series, what = [f"{label} against {labels[0]}" for label in labels[1:]], f"change to {labels[0]}"
    else:
        rows = [(row.variant, list(row.against_baseline)) for row in comparison.relative]
        series, what = labels, f"change to the study's own {BASELINE}"
    if not rows:
        return None
    data = []
    for place, name in enumerate(series):
        points = [(variant, found[place]) for variant, found in rows if found[place] is not None]
        data.append(_points(name, points, STUDY_COLOURS[place % len(STUDY_COLOURS)]))
    names = [text(variant) for variant, _ in rows][::-1]
    return {
        "data": data,
        "layout": {
            "height": 140 + 44 * len(rows),
            "margin": {"l": 130, "r": 24, "t": 34, "b": 48},
            "showlegend": True,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            "scattermode": "group",
            "xaxis": {"title": {"text": f"{text(what)}, % of perplexity (left is better)"}, "zeroline": True,
                      "zerolinewidth": 2},
            "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": names},
        },
        "narrow": NARROW | {"margin": {"l": 104, "r": 12, "t": 34}, "height": 150 + 44 * len(rows),
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
        "name": text(name),
        "x": middle,
        "y": [text(variant) for variant, _ in found],
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
        "hovertemplate": "%{y}: %{x:+.3g} %<extra>" + text(name) + "</extra>",
    }  # fmt: skip


def curves(lines: list[Alignment], variants: list[str]) -> Figure:
    """Relative difference against iteration, a line a run, in percent on a logarithmic axis."""
    data: list[dict[str, Any]] = []
    last = max(line.iterations for line in lines)
    for line in lines:
        ink = colour(line.variant, variants)
        data.append(_curve(line.curve, {"color": ink, "width": 1.6}, text(line.run), line.variant))
    for seed in sorted({line.seed for line in lines}):
        envelope = next(line.envelope_curve for line in lines if line.seed == seed)
        if envelope:
            noise = {"color": "var(--noise)", "width": 1.4, "dash": "dot"}
            data.append(_curve(envelope, noise, f"control arms, seed {seed}", None))
    rule = {"color": "var(--ink)", "width": 1.2, "dash": "dash"}
    data.append(_curve({1: RULE, last: RULE}, rule, "one percent", None))
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
    """A line; zeros, which a logarithmic axis cannot show, leave a gap."""
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
    return trace if variant is None else trace | {"meta": {"variant": text(variant)}}
