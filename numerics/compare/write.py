"""Write a comparison: compare_result.csv, compare.json and compare.html."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from numerics.compare.causes.divergence import Divergence
from numerics.compare.page import comparison_page
from numerics.compare.run import Comparison, StepComparison
from numerics.compare.summary import stack_of
from numerics.compare.table.measure import METRICS, TensorDifference
from numerics.compare.table.rows import CallRow, Cell
from numerics.compare.table.step_record import Value
from numerics.dump_files import finite, write_json, writing


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the three files. Returns their paths."""
    paths = [folder / name for name in ("compare_result.csv", "compare.json", "compare.html")]
    with writing(folder, "give another folder by -o"):
        folder.mkdir(parents=True, exist_ok=True)
        with paths[0].open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *_csv_rows(comparison)])
        write_json(paths[1], as_json(comparison))
        paths[2].write_text(comparison_page(comparison), encoding="utf-8")
    return paths


NUMBERS = ("max", "min", "mean", "norm")
COLUMNS = [
    *("step", "target name", "golden name", "side", "place", "target dtype", "golden dtype"),
    *("target shape", "golden shape", *METRICS, "error in units of rounding", "result", "difference"),
    *(f"{side} {name}" for side in ("target", "golden") for name in NUMBERS),
]


def _csv_rows(comparison: Comparison) -> list[list[Any]]:
    return [
        line
        for step in comparison.steps
        for row in step.rows
        for line in ([_csv_row(step, row, cell) for cell in row.cells] or [_csv_row(step, row, None)])
    ]


def _csv_row(step: StepComparison, row: CallRow, cell: Cell | None) -> list[Any]:
    names = [call.name if call else "" for call in (row.pair.target, row.pair.golden)]
    if cell is None:
        cell = Cell("", "", None, None, TensorDifference(not row.settings, 0.0, "; ".join(row.settings)))
    values = (cell.target or Value(""), cell.golden or Value(""))
    metrics = [cell.difference.metrics.get(name, "") for name in METRICS]
    return [
        *(step.place, *names, cell.side, cell.place),
        *(value.dtype for value in values),
        *(list(value.shape) if value.dtype else "" for value in values),
        *metrics,
        _units(cell.difference.error, row.epsilon),
        "equal" if cell.difference.equal else row.grade,
        cell.difference.what,
        *(number for value in values for number in value.statistics),
    ]


def _units(error: float, epsilon: float) -> float:
    return error / epsilon if epsilon else (math.inf if error else 0.0)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return what compare.json holds: verdict, first_divergence and rows. Numbers that are not finite are null."""
    first = comparison.first
    return {
        "verdict": comparison.verdict,
        "uncompared": comparison.uncompared,
        "first_divergence": _divergence_json(*first) if first else None,
        "first_unequal": comparison.first_unequal,
        "target": str(comparison.target),
        "golden": str(comparison.golden),
        "notes": comparison.notes,
        "findings": [text for step in comparison.steps for text in step.judgement.findings],
        "rows": [_row_json(step, row) for step in comparison.steps for row in step.rows],
    }


def _divergence_json(step: StepComparison, found: Divergence) -> dict[str, Any]:
    call = found.row.pair.call
    return {
        "name": found.name,
        "module": found.module,
        "row": call.name,
        "step": step.place,
        "direction": found.direction,
        "cause": found.cause,
        "what": found.what,
        "units": finite(found.units),
        "why": found.why,
        "stack": stack_of(step, found),
    }


def _row_json(step: StepComparison, row: CallRow) -> dict[str, Any]:
    target, golden = row.pair.target, row.pair.golden
    return {
        "step": step.place,
        "name": row.name,
        "target": target.name if target else None,
        "golden": golden.name if golden else None,
        "matched_by": row.pair.how,
        "direction": "backward" if row.pair.call.backward else "forward",
        "grade": row.grade,
        "units_in": finite(row.units("input")),
        "units_parameters": finite(row.units("parameter")),
        "units_out": finite(row.units("output")),
        "units_gradients": finite(row.units("gradient")),
        "replayed_units": [finite(number) for number in row.replayed]
        if row.replayed
        else row.replayed_why or None,
        "differs": row.differs,
    }
