"""Print a comparison, write it as compare_result.csv and compare.json, and make the tables of its page."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from referee.numerics.compare.compare_records import Comparison
from referee.numerics.compare.compared_rows import CallRow, Cell
from referee.numerics.compare.first_divergence import StepComparison
from referee.numerics.compare.tensor_difference import METRICS, TensorDifference
from referee.numerics.record.read_record import STATISTICS, Value
from referee.numerics.rows import HEADINGS, TableRow, text_table
from referee.numerics.text_files import write_json, writing
from referee.pages.document import Block, BulletList, Details, Section, Table
from referee.pages.markup import Code, Text

PRINTED = 6  # rows in a terminal
COLUMNS = [
    *("step", "target name", "golden name", "side", "place", "target dtype", "golden dtype"),
    *("target shape", "golden shape", *METRICS, "error in units of rounding", "result", "difference"),
    *(f"{side} {name}" for side in ("target", "golden") for name in STATISTICS),
]


def summary(comparison: Comparison) -> list[str]:
    """Return the lines that the command prints: verdict, table, what is next to the first row, notes."""
    counts = Counter(row.grade for step in comparison.steps for row in step.rows)
    first, rows = comparison.first, comparison.rows
    lines = [f"verdict: {comparison.verdict_text}"]
    if first:
        lines.append(f"first divergence: {first.call} ({first.direction}) {first.step}".rstrip())
    elif comparison.first_unequal:
        lines.append(f"first unequal: {comparison.first_unequal}")
    lines += text_table(rows[:PRINTED])
    lines += [f"{len(rows) - PRINTED} more rows, in compare.json"] if len(rows) > PRINTED else []
    lines += list(first.context) if first else []
    lines.append("calls: " + ", ".join(f"{number} {grade}" for grade, number in counts.items()))
    lines += [f"incomplete: {text}" for text in comparison.incomplete]
    return [*lines, *(f"note: {note}" for note in comparison.notes)]


def next_command(comparison: Comparison) -> str:
    """Return what to do next, or an empty text."""
    first = comparison.first
    if not first:
        return ""
    cells = [cell for step in comparison.steps for row in step.rows for cell in row.cells]
    if first.evidence in ("data", "parameter", "setting", "one side", "update"):
        return "next: make both sides equal there, record both again and compare"
    if not any(cell.target and cell.target.has_values for cell in cells):
        listed = f'"list": ["{first.module}"]' if first.module else '"list": []'
        return f'next: record both sides with "level": "mix", "task": "tensor", {listed}, and compare these records'
    return "next: read the code at the call stack of compare.html, or replace the operation and compare"


def write_tables(comparison: Comparison, folder: Path) -> list[Path]:
    """Write compare_result.csv and compare.json. Returns their paths."""
    paths = [folder / name for name in ("compare_result.csv", "compare.json")]
    with writing(folder, "give another folder by -o"):
        folder.mkdir(parents=True, exist_ok=True)
        with paths[0].open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *_csv_rows(comparison)])
        write_json(paths[1], as_json(comparison))
    return paths


def comparison_blocks(comparison: Comparison) -> list[Block]:
    """Return what the page has above the tree of all calls."""
    first = comparison.first
    return [
        _table("First divergence", [first], first.context) if first else Section("No divergence", []),
        _table("Further differences", comparison.rows[1 if first else 0 :]),
        Section("Notes", [BulletList([*comparison.incomplete, *comparison.notes])]),
    ]


def _table(title: str, rows: Sequence[TableRow], context: Sequence[str] = ()) -> Section:
    stack = rows[0].stack if rows else ()
    lines: list[list[Text]] = [[Code(row.cells[0]), *row.cells[1:]] for row in rows]
    details = [Details("Call stack", [BulletList([Code(line) for line in stack])])] if stack else []
    return Section(title, [Table(list(HEADINGS), lines, (1, 7)), BulletList(list(context)), *details])


def _csv_rows(comparison: Comparison) -> list[list[Any]]:
    return [
        line
        for step in comparison.steps
        for row in step.rows
        for line in ([_csv_row(step, row, cell) for cell in row.cells] or [_csv_row(step, row, None)])
    ]


def _csv_row(step: StepComparison, row: CallRow, cell: Cell | None) -> list[Any]:
    names = [call.name if call else "" for call in (row.target, row.golden)]
    if cell is None:
        texts = "; ".join(value.text for value in row.settings)
        cell = Cell("", "", None, None, TensorDifference(not row.settings, 0.0, texts))
    values = (cell.target or Value(""), cell.golden or Value(""))
    return [
        *(step.place, *names, cell.side, cell.place),
        *(value.dtype for value in values),
        *(list(value.shape) if value.dtype else "" for value in values),
        *(cell.difference.metrics.get(name, "") for name in METRICS),
        row.in_units(cell.difference.error),
        "equal" if cell.difference.equal else row.grade,
        cell.difference.what,
        *(number for value in values for number in value.statistics),
    ]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return what compare.json holds. Numbers that are not finite are null."""
    first = comparison.first
    return {
        "verdict": comparison.verdict_text,
        "incomplete": comparison.incomplete,
        "first_divergence": first.as_json | {"row": first.row.name if first.row else None} if first else None,
        "first_unequal": comparison.first_unequal,
        "target": str(comparison.target),
        "golden": str(comparison.golden),
        "notes": comparison.notes,
        "findings": [row.cells for row in comparison.rows[1 if first else 0 :]],
    }
