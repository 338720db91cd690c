"""The document and the JSON of a repeated step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numerics.dump_files import write_json, writing
from numerics.repeat.conclude import Conclusion, RepeatCause
from numerics.repeat.conditions import Condition
from numerics.repeat.trace import Uncompared, uncompared
from pages.document import Block, BulletList, Document, Paragraph, Section, Table, render_terminal
from pages.markup import Strong, Text
from pages.page import render_html

SCHEMA = 1
LIMITED = " in what could be compared"
MOST_LISTED = 3  # operations or results in a sentence


@dataclass(frozen=True)
class Repetition:
    """A repeated step: its conditions and the conclusion. notes: of the caller, beside those of the conclusion."""

    conditions: Mapping[str, Condition]
    conclusion: Conclusion
    operations: int
    notes: tuple[str, ...] = ()

    @property
    def uncompared(self) -> list[Uncompared]:
        """Return the operations and results that could not be compared."""
        return uncompared(trace for condition in self.conditions.values() for trace in condition.traces)

    @property
    def verdict(self) -> str:
        """Return the name of the conclusion, with a reservation where it is not a fault and not all was compared."""
        limited = bool(self.uncompared) and not self.conclusion.is_fault
        return self.conclusion.name + (LIMITED if limited else "")

    @property
    def reservation(self) -> str:
        """Say what could not be compared: "2 operations could not be compared: ..."; "" where all was."""
        found = self.uncompared
        counts = [
            f"{count} {word}{'s' * (count > 1)}"
            for word, count in (
                ("operation", sum(not each.is_result for each in found)),
                ("result", sum(each.is_result for each in found)),
            )
            if count
        ]
        listed = list(dict.fromkeys(f"{each.name}: {each.reason}" for each in found))
        more = ["..."] if len(listed) > MOST_LISTED else []
        words = "; ".join([*listed[:MOST_LISTED], *more])
        return f"{' and '.join(counts)} could not be compared: {words}" if found else ""

    def document(self, title: str = "Is the step reproducible?") -> Document:
        return repetition_document(self, title)

    def text(self) -> str:
        """Return the conclusion for a terminal."""
        return render_terminal(self.document())


def repetition_document(found: Repetition, title: str) -> Document:
    conclusion = found.conclusion
    blocks: list[Block] = [Paragraph(("Conclusion: ", Strong(found.verdict, bad=conclusion.is_fault), "."))]
    if found.reservation:
        blocks.append(Paragraph(f"{found.reservation}."))
    if not conclusion.findings:
        total = sum(len(condition.traces) for condition in found.conditions.values())
        blocks.append(
            Paragraph(
                f"All {total} repetitions have equal results to the bit{LIMITED * bool(found.reservation)}. A fault "
                "that is rarer than that, or that needs other conditions, is not excluded."
            )
        )
    for number, finding in enumerate(conclusion.findings, 1):
        blocks.append(Section(f"{number}. {finding.name}", _finding(finding)))
    rows: list[list[Text]] = [
        [
            name,
            str(condition.threads),
            str(len(condition.traces)),
            "-" if len(condition.traces) < 2 else _results(condition),
        ]
        for name, condition in found.conditions.items()
    ]
    blocks.append(
        Section("Conditions", [Table(["Condition", "Threads", "Repetitions", "Results"], rows, (3,))])
    )
    blocks.append(Section("Notes", [BulletList([*found.notes, *conclusion.notes])]))
    return Document(title, blocks, f"{found.operations} operations in the step")


def _results(condition: Condition) -> str:
    if all(trace.error for trace in condition.traces):
        return "none, it raises"
    if (distinct := condition.distinct) > 1:
        return f"{distinct} different"
    return "equal" + LIMITED * bool(uncompared(condition.traces))


def _finding(finding: RepeatCause) -> list[Block]:
    grade = "harmless" if finding.harmless else f"section {finding.section} of the guide"
    return [
        Paragraph(f"{finding.meaning} ({grade})"),
        BulletList(list(finding.evidence)),
        BulletList([f"try: {text}" for text in finding.suggestions]),
    ]


def as_json(found: Repetition) -> dict[str, Any]:
    """Return plain data: conclusion, findings, conditions with the number of different traces, notes."""
    return {
        "schema": SCHEMA,
        "conclusion": found.verdict,
        "fault": found.conclusion.is_fault,
        "operations": found.operations,
        "uncompared": [dataclasses.asdict(each) for each in found.uncompared],
        "findings": [_plain(finding) for finding in found.conclusion.findings],
        "conditions": {
            name: {
                "threads": condition.threads,
                "repetitions": len(condition.traces),
                "different": condition.distinct,
            }
            for name, condition in found.conditions.items()
        },
        "notes": [*found.notes, *found.conclusion.notes],
    }


def _plain(finding: RepeatCause) -> dict[str, Any]:
    operation = finding.operation
    return {
        "name": finding.name,
        "harmless": finding.harmless,
        "section": finding.section,
        "meaning": finding.meaning,
        "evidence": list(finding.evidence),
        "operation": operation
        and {
            "name": operation.name,
            "phase": operation.phase,
            "place": operation.place,
            "source": operation.source,
        },
        "corruption": finding.corruption and dataclasses.asdict(finding.corruption),
        "suggestions": list(finding.suggestions),
    }


def write_repetition(found: Repetition, folder: Path, title: str) -> list[Path]:
    """Write repeat.json and repeat.html into the folder. Returns their paths."""
    paths = [folder / "repeat.json", folder / "repeat.html"]
    with writing(folder, "give another folder for the results"):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(paths[0], as_json(found))
        paths[1].write_text(render_html(found.document(title)), encoding="utf-8")
    return paths
