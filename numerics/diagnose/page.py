"""The diagnosis as a document: lines of the terminal, and a page with both curves and their relative difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from numerics.diagnose.flow import Flow
from numerics.diagnose.pair import LOSS, NORM
from numerics.diagnose.rules import NONE, SYMPTOMS, TOLERANCE, Diagnosis
from pages.document import (
    HTML,
    Block,
    BulletList,
    Details,
    Document,
    Figure,
    Note,
    Only,
    Paragraph,
    Section,
    Table,
)
from pages.markup import Code, Link, Strong, Text, escape_html
from pages.plots import Plain, axis, figure, line

POINTS = 2000  # of a curve in a figure
COLORS = ("var(--accent)", "var(--bad)")
NARROW = {"margin": {"l": 62, "r": 16}, "font": {"size": 11}, "height": 320}


def diagnosis_document(diagnosis: Diagnosis, flow: Flow, compared: str = "") -> Document:
    """compared: the address of the page of the comparison, where one was made."""
    pair, found = diagnosis.pair, diagnosis.finding
    bad = found.symptom.name != NONE
    blocks: list[Block] = [
        Paragraph(("Symptom: ", Strong(found.symptom.name, bad=bad), f": {found.evidence}.")),
        Only((HTML,), [Paragraph(("First divergence: ", Strong(flow.cause)) if flow.cause else "")]),
        BulletList([f"also {other.symptom.name}: {other.evidence}" for other in diagnosis.findings[1:]]),
        Only((HTML,), [_next(flow, compared)]),
        Section("Flow, with sections of the guide", [_flow(flow)]),
        Section("Curves", [Only((HTML,), _figures(diagnosis))]),
        Section("Evaluations", [_scores(diagnosis)]),
        Section("Notes", [BulletList(diagnosis.notes)]),
        Only((HTML,), [Details("The rules of all symptoms", [_rules()])]),
    ]
    subtitle = f"{pair.first.name} against {pair.second.name}, {len(pair.steps)} common steps"
    return Document(
        f"Why do two runs differ? {found.symptom.name if bad else 'No symptom'}", blocks, subtitle
    )


def _next(flow: Flow, compared: str) -> Section:
    items: list[Text] = [
        (f"{command.machine}: " if command.machine else "", Code(command.text)) for command in flow.commands
    ]
    page: list[Block] = [Paragraph(Link("The comparison of the records", compared))]
    return Section("Next", [BulletList(items or ["nothing"]), *(page if compared else [])])


def _flow(flow: Flow) -> BulletList:
    return BulletList(
        [(Strong(step.title), f", {step.state} ({step.section}): {step.finding}") for step in flow.steps]
    )


def _scores(diagnosis: Diagnosis) -> Table:
    rows: list[Sequence[Text]] = [
        [
            score.name,
            f"{score.first:.6g}",
            f"{score.second:.6g}",
            f"{100 * score.relative:.3g} %",
            "unknown" if score.error is None else f"{score.error:.2g}",
            "differs" if score.differs else "agrees",
        ]
        for score in diagnosis.scores
    ]
    return Table(
        ["Evaluation", "First run", "Second run", "Difference", "Standard error", "Result"], rows, (5,)
    )


def _rules() -> Table:
    rows = [[symptom.name, symptom.rule, symptom.section] for symptom in SYMPTOMS.values()]
    return Table(["Symptom", "Rule", "Guide"], rows, (1, 2))


def _figures(diagnosis: Diagnosis) -> list[Block]:
    has_norms = all(side.gradient_norms for side in diagnosis.pair.sides)
    return [
        Figure("losses", _curves(diagnosis, LOSS), "Training loss of both runs."),
        Figure(
            "difference",
            _difference(diagnosis),
            "Relative difference at each common step. Dashed: 1 %. Dotted: the steps that the rules name.",
        ),
        Figure("norms", _curves(diagnosis, NORM) if has_norms else None, "Gradient norm of both runs."),
        Note("A value that is not finite leaves a gap, and so does a difference of zero."),
    ]


def _curves(diagnosis: Diagnosis, what: str) -> Plain:
    data = []
    for side, ink, dash in zip(diagnosis.pair.sides, COLORS, ("solid", "dot"), strict=True):
        curve = side.losses if what == LOSS else side.gradient_norms
        data.append(_line(side.name, ink, _thinned(list(curve.items())), what, width=1.8, dash=dash))
    across, up = axis("step"), axis(what)
    return figure(
        data, 340, (66, 24, 12, 48), NARROW, showlegend=True, legend=_legend(), xaxis=across, yaxis=up
    )


def _difference(diagnosis: Diagnosis) -> Plain | None:
    pair = diagnosis.pair
    data = []
    for what, ink in ((LOSS, "var(--v1)"), (NORM, "var(--v6)")):
        items = [(step, 100 * value) for step, value in pair.differences(what).items()]
        if any(value > 0 for _, value in items):
            shown = [(step, value if value > 0 else math.nan) for step, value in _thinned(items)]
            data.append(_line(f"{what}, %", ink, shown, what, width=1.6, markers=len(items) < 50))
    if not data:
        return None
    first, last = int(pair.steps[0]), int(pair.steps[-1])
    limit = [(first, 100 * TOLERANCE), (max(last, first + 1), 100 * TOLERANCE)]
    data.append(_line("1 %", "var(--ink)", limit, "limit", width=1.2, dash="dash"))
    sizes = [value for part in data for value in part["y"] if value]
    for step, name in _marks(diagnosis):
        ends = [(step, min(sizes)), (step, max(sizes))]
        data.append(_line(name, "var(--noise)", ends, name, width=1.2, dash="dot"))
    across, up = axis("step"), axis("relative difference, %", type="log", nticks=7, exponentformat="power")
    return figure(
        data, 400, (66, 24, 12, 48), NARROW, showlegend=True, legend=_legend(), xaxis=across, yaxis=up
    )


def _marks(diagnosis: Diagnosis) -> list[tuple[int, str]]:
    """The steps that the rules name, with one label each."""
    marks: dict[int, list[str]] = {}
    for place, name in ((diagnosis.unequal, "first unequal"), (diagnosis.beyond, "beyond rounding")):
        if place is not None:
            marks.setdefault(place.step, []).append(name)
    if diagnosis.symptom.name != NONE:
        marks.setdefault(diagnosis.finding.step, []).append(diagnosis.symptom.name)
    return [(step, ", ".join(names)) for step, names in marks.items()]


def _line(
    name: str,
    ink: str,
    items: Sequence[tuple[int, float]],
    what: str,
    markers: bool = False,
    **style: Any,
) -> Plain:
    y = [float(f"{value:.6g}") if math.isfinite(value) else None for _, value in items]
    hover = f"step %{{x}}: %{{y:.5g}}<extra>{escape_html(what)}</extra>"
    if markers or len(items) == 1:
        style["marker"] = {"size": 6, "color": ink}
    return line(name, ink, x=[step for step, _ in items], y=y, hovertemplate=hover, **style)


def _thinned(items: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the largest and the smallest value of each of POINTS / 2 stretches, and values that are not finite."""
    if len(items) <= POINTS:
        return items
    width = -(-2 * len(items) // POINTS)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(items), width):
        part = sorted(items[start : start + width], key=lambda item: item[1])
        kept += sorted({part[0], part[-1]})
    return kept


def _legend() -> Plain:
    return {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
