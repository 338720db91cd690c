"""The page of a comparison: the verdict, the first divergence, and all calls with a filter by grade."""

from __future__ import annotations

import math

from numerics.compare.causes.divergence import Divergence
from numerics.compare.judge import GROWTH
from numerics.compare.run import Comparison, StepComparison
from numerics.compare.summary import next_command, stack_of, summary
from numerics.compare.table.rows import BEYOND, GRADES, SIDES, UNMATCHED, WRONG, CallRow
from pages.document import Block, BulletList, Details, Document, Note, Paragraph, Section, Table
from pages.markup import Code, ColorLabel, Strong, Text
from pages.page import render_html

COLORS = {WRONG: 7, BEYOND: 5, "rounding": 1, "equal": 2, UNMATCHED: 9}  # of the page's palette
MEANING = (
    "wrong: the inputs agree and the result does not, the first divergence.",
    "beyond rounding: the result differs by more than rounding, as its inputs do: a consequence.",
    "rounding: the result differs by no more than correct kernels do.",
    "equal: every recorded result is equal. unmatched: the call is on one side alone.",
)


def comparison_page(comparison: Comparison) -> str:
    """Return the page as HTML."""
    blocks: list[Block] = [BulletList(summary(comparison)[1:]), Paragraph(next_command(comparison))]
    if found := comparison.first:
        blocks.append(_first(*found))
    blocks += [_calls(number, step) for number, step in enumerate(comparison.steps)]
    findings = [text for step in comparison.steps for text in step.judgement.findings]
    blocks.append(Section("Further differences", [BulletList(findings)]))
    title = f"Comparison of two records: {comparison.verdict_text}"
    return render_html(Document(title, blocks, f"target {comparison.target}, golden {comparison.golden}"))


def _first(step: StepComparison, found: Divergence) -> Section:
    row = found.row
    calls = [call for call in (row.pair.target, row.pair.golden) if call is not None]
    settings = {name: None for call in calls for name in call.settings}
    target, golden = row.pair.target, row.pair.golden
    return Section(
        "First divergence",
        [
            Paragraph((Strong(found.name, bad=True), f", {found.direction}: {found.why}.")),
            BulletList(found.what),
            Table(
                ["Value", "Target", "Golden", "Units of rounding"],
                [
                    [
                        f"{cell.side} {cell.place}",
                        cell.target.describe() if cell.target else "absent",
                        cell.golden.describe() if cell.golden else "absent",
                        "equal" if cell.difference.equal else _units(cell.difference.error, row.epsilon),
                    ]
                    for cell in row.cells
                ],
                (1, 2),
            ),
            Table(
                ["Setting", "Target", "Golden"],
                [
                    [
                        name,
                        *(
                            str(call.settings.get(name, "absent")) if call else ""
                            for call in (target, golden)
                        ),
                    ]
                    for name in settings
                ],
                (1, 2),
            ),
            Details("Call stack", [BulletList([Code(line) for line in stack_of(step, found)])]),
        ],
    )


def _calls(number: int, step: StepComparison) -> Section:
    rows = step.rows
    return Section(
        f"Calls {step.place}".strip(),
        [
            Note(" ".join(MEANING)),
            Note(f"A result is explained up to {GROWTH:g} times the rounding and the error of its inputs."),
            Table(
                [
                    "Call",
                    "Grade",
                    "Inputs",
                    "Parameters",
                    "Results",
                    "Gradients",
                    "Float64 replay",
                    "Differs",
                ],
                [_line(row) for row in rows],
                (1, 7),
                kinds=[row.grade for row in rows],
                name=f"grade{number}",
            ),
        ],
    )


def _line(row: CallRow) -> list[Text]:
    label = ColorLabel(row.grade, COLORS[row.grade]) if row.grade in GRADES else row.grade
    if row.grade == UNMATCHED:
        side = "golden" if row.pair.golden else "target"
        return [Code(row.name), label, "", "", "", "", "", f"in the {side} record alone"]
    replayed = f"{row.replayed[0]:.3g} / {row.replayed[1]:.3g}" if row.replayed else row.replayed_why
    return [
        Code(row.name),
        label,
        *(_units(row.error(side), row.epsilon) for side in SIDES),
        replayed,
        "; ".join(row.differs),
    ]


def _units(error: float, epsilon: float) -> str:
    if not error:
        return "0"
    units = error / epsilon if epsilon else math.inf
    return f"{units:.3g}" if math.isfinite(units) else "infinite"
