"""Show a compared checklist: terminal, check_config.json and check_config.html."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numerics.checklist.checks import (
    EQUAL,
    FATAL,
    NOT_RECORDED,
    WORST_FIRST,
    ChecklistRow,
    counts,
    status_text,
    worst_first,
)
from numerics.checklist.compare import compare_snapshots
from numerics.checklist.snapshot import read_snapshot
from numerics.dump_files import write_json, writing
from pages.document import (
    HTML,
    TERMINAL,
    Block,
    BulletList,
    Details,
    Document,
    Note,
    Only,
    Paragraph,
    Section,
    Table,
)
from pages.markup import Detail, Text
from pages.page import render_html

LONGEST = 120  # characters of a value in a table
MEANING = (
    "fatal: the two sides compute something else.",
    "suspect: it may change more than rounding.",
    "harmless: only rounding, speed or places can change.",
    "not recorded: agreement cannot be shown.",
)


@dataclasses.dataclass(frozen=True)
class ZipComparison:
    """The compared zips of two machines."""

    labels: tuple[str, str]
    checks: list[ChecklistRow]

    @property
    def verdict(self) -> str:
        """The worst status of a finding, or equal."""
        found = {check.status for check in self.checks}
        return next((grade for grade in WORST_FIRST if grade in found), EQUAL)


def compare_zips(a: Path, b: Path) -> ZipComparison:
    """Read and compare two zips. NumericsError names the one that cannot be used."""
    checks = compare_snapshots(read_snapshot(a), read_snapshot(b))
    labels = (a.name, b.name) if a.name != b.name else (str(a), str(b))
    return ZipComparison(labels, checks)


def comparison_document(comparison: ZipComparison) -> Document:
    """Return the document: findings the worst first, equal entries behind a fold."""
    checks = worst_first(comparison.checks)
    findings = [check for check in checks if check.status != EQUAL]
    equal = [check for check in checks if check.status == EQUAL]
    headings = ["Entry", "Grade", *comparison.labels]
    rows: list[list[Text]] = [
        [(shorten(check.subject), Detail(check.group)), status_text(check), *map(shorten, check.values)]
        for check in findings
    ]
    lines = [
        f"{check.status}: {check.group}: {shorten(check.subject)}: "
        f"{' | '.join(map(shorten, check.values))} ({check.reason})"
        for check in findings
    ]
    table = Table(headings, rows, (1, 2, 3), kinds=[check.status for check in findings], name="grade")
    same = Table(
        ["Entry", "Group", "Value"],
        [[shorten(check.subject), check.group, shorten(check.values[0])] for check in equal],
        (1, 2),
    )
    blocks: list[Block] = [
        Paragraph(f"Entries: {counts(checks)}." if checks else "No entries."),
        Only((HTML,), [Note(" ".join(MEANING))]),
        Section("Differences", [Only((HTML,), [table]), Only((TERMINAL,), [BulletList(lines)])]),
        Only((HTML,), [Details(f"{len(equal)} entries that are equal", [same])]),
        Paragraph(next_step(comparison)),
    ]
    title = f"Checklist: {comparison.verdict}"
    return Document(title, blocks, f"{comparison.labels[0]} | {comparison.labels[1]}")


def next_step(comparison: ZipComparison) -> str:
    """Return what to do next."""
    if comparison.verdict == FATAL:
        return "Next: make the fatal entries equal, pack both sides and compare again."
    if comparison.verdict == NOT_RECORDED:
        return "Next: pack what is not recorded on both sides and compare again."
    return "Next: fix the randomness (seed_all) and record the first step that differs on both sides."


def shorten(text: str) -> str:
    """Cut a value for a table. check_config.json has it whole."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def as_json(comparison: ZipComparison) -> dict[str, Any]:
    """Return what check_config.json holds."""
    kinds = [check.status for check in comparison.checks]
    return {
        "verdict": comparison.verdict,
        "a": comparison.labels[0],
        "b": comparison.labels[1],
        "counts": {kind: kinds.count(kind) for kind in WORST_FIRST},
        "rows": [
            {
                "group": check.group,
                "entry": check.subject,
                "grade": check.status,
                "a": check.values[0],
                "b": check.values[1],
                "reason": check.reason,
            }
            for check in worst_first(comparison.checks)
        ],
    }


def write_comparison(comparison: ZipComparison, folder: Path) -> Sequence[Path]:
    """Write check_config.json and check_config.html. Returns their paths."""
    data, page = folder / "check_config.json", folder / "check_config.html"
    with writing(folder, "give another folder by -o"):
        write_json(data, as_json(comparison))
        page.write_text(render_html(comparison_document(comparison)), encoding="utf-8")
    return [data, page]
