"""Print and write a repeated step: repeat.json, repeat.html and lines of a terminal, all of one table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from numerics.dump_files import finite, write_json, writing
from numerics.repeat.repeat_evidence import LIMITED, RepeatCause, Repetition
from numerics.rows import HEADINGS, text_table
from pages.document import Block, BulletList, Document, Paragraph, Section, Table
from pages.page import render_html

MOST_LISTED = 3  # operations or results that could not be compared


def report_lines(found: Repetition) -> list[str]:
    """Return the verdict, the table, what to try, and notes."""
    total = sum(len(condition.traces) for condition in found.conditions.values())
    listed = found.uncompared()
    lines = [
        f"conclusion: {found.verdict}, {found.operations} operations in the step",
        *text_table(found.rows()),
    ]
    if not found.causes:
        lines.append(
            f"all {total} repetitions have equal results to the bit{LIMITED * bool(listed)}; a fault that is rarer, or "
            "that needs other conditions, is not excluded"
        )
    lines += [f"try: {text}" for cause in found.causes for text in cause.suggestions]
    if listed:
        lines.append(
            f"{len(listed)} operations or results could not be compared: {'; '.join(listed[:MOST_LISTED])}"
        )
    return [*lines, *(f"note: {note}" for note in found.notes)]


def as_json(found: Repetition) -> dict[str, Any]:
    """Return plain data: conclusion, causes, conditions with the number of different traces, notes."""
    return {
        "conclusion": found.verdict,
        "fault": found.is_fault,
        "operations": found.operations,
        "uncompared": found.uncompared(),
        "causes": [_plain(cause) for cause in found.causes],
        "conditions": {
            name: {"threads": one.threads, "repetitions": len(one.traces), "different": one.distinct}
            for name, one in found.conditions.items()
        },
        "rows": [{name: finite(value) for name, value in vars(row).items()} for row in found.rows()],
        "notes": found.notes,
    }


def _plain(cause: RepeatCause) -> dict[str, Any]:
    event = cause.operation
    names = ("name", "phase", "place", "source")
    return {
        "name": cause.name,
        "harmless": cause.harmless,
        "difference": cause.difference,
        "operation": event and {name: getattr(event, name) for name in names},
        "pattern": cause.pattern and dataclasses.asdict(cause.pattern),
        "suggestions": cause.suggestions,
    }


def write_repetition(found: Repetition, folder: Path, title: str) -> list[Path]:
    """Write repeat.json and repeat.html into the folder. Returns their paths."""
    paths = [folder / "repeat.json", folder / "repeat.html"]
    table = Table(list(HEADINGS), [row.cells for row in found.rows()])
    suggestions = [text for cause in found.causes for text in cause.suggestions]
    blocks: list[Block] = [
        Paragraph(f"Conclusion: {found.verdict}."),
        Section("Causes and conditions", [table]),
        Section("Try", [BulletList(suggestions)]),
        Section("Notes", [BulletList([*found.uncompared(), *found.notes])]),
    ]
    with writing(folder, "give another folder for the results"):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(paths[0], as_json(found))
        paths[1].write_text(render_html(Document(title, blocks)), encoding="utf-8")
    return paths
