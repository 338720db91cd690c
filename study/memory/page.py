"""The tables and the page of `make memory`: predicted, measured, by phase, kind and module, and the plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from gpt2.config.batch import BatchPlan
from gpt2.hardware.gpu_specs import GIB
from gpt2.hardware.resolve import ResolvedTarget
from gpt2.memory.chart import readable, svg
from gpt2.memory.prediction import Prediction

PHASES = ("forward", "backward", "optimizer", "evaluation")
MODULES = 12  # rows of the module table
STYLE = (
    "body{font-family:sans-serif;max-width:1040px;margin:2em auto}table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}"
)


@dataclass
class Row:
    """One variant at one micro-batch on one target. largest: the largest micro-batch that fits (None: not asked).

    alike: the variant of the same cost class that the figures were made with. measured: what `measured_by` gave.
    """

    name: str
    micro: int
    prediction: Prediction
    largest: int | None
    fits: bool
    alike: str = ""
    measured: dict[str, dict[str, int]] | None = None

    @property
    def cells(self) -> list[str]:
        phases = self.prediction.timeline.by_phase()
        largest = "" if self.largest is None else str(self.largest)
        return [
            self.name,
            str(self.micro),
            readable(self.prediction.peak_bytes),
            *(readable(phases[name]) for name in PHASES),
            largest,
            "yes" if self.fits else "NO",
        ]


HEADER = ["variant", "micro", "peak", *PHASES, "largest micro", "fits"]


def table(rows: Iterable[list[str]]) -> list[str]:
    """Rows of cells -> aligned lines, the first column to the left."""
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def heading(resolved: ResolvedTarget, batch: BatchPlan, size: str, margin: float) -> str:
    """What was planned, in a line."""
    room = resolved.memory_bytes * (1 - margin)
    return (
        f"{resolved.target.name} ({resolved.device_name}, {resolved.memory_bytes / GIB:.2f} GiB, {resolved.dtype}): "
        f"GPT-2 {size}, sequences of {batch.block_size}; plan: micro-batch {batch.micro} x {batch.accumulation} = "
        f"{batch.effective} sequences; room {room / GIB:.2f} GiB, {margin:.0%} kept free"
    )


def kinds_table(prediction: Prediction) -> list[list[str]]:
    """What is alive at the peak by kind."""
    timeline = prediction.timeline
    peak = timeline.peak_event()
    header = [f"at the peak, in {timeline.phase_at(peak)}, by kind", "bytes"]
    return [header, *([kind, readable(n)] for kind, n in timeline.by_kind(peak).items() if n)]


def modules_table(prediction: Prediction) -> list[list[str]]:
    """The modules that hold most at the peak; a `*` stands for all layers."""
    timeline = prediction.timeline
    rows = timeline.by_module(timeline.peak_event())[:MODULES]
    return [["at the peak, by module", "kind", "bytes"], *([m, kind, readable(n)] for m, kind, n in rows)]


def measured_table(rows: Iterable[Row]) -> list[list[str]]:
    """Predicted beside measured, by phase; the error is the prediction's."""
    cells = [["variant", "phase", "predicted", "allocated", "error", "resident", "error"]]
    for row in rows:
        if not row.measured or row.alike:
            continue
        predicted = row.prediction.timeline.by_phase() | {"all": row.prediction.peak_bytes}
        for phase in (*PHASES, "all"):
            seen = [row.measured[how].get(phase) for how in ("allocated", "resident")]
            if any(seen):
                pairs = [[readable(n), f"{predicted[phase] / n - 1:+.1%}"] if n else ["", ""] for n in seen]
                cells.append([row.name, phase, readable(predicted[phase]), *pairs[0], *pairs[1]])
    return cells


def as_json(rows: Iterable[Row], head: str) -> dict[str, Any]:
    """The same numbers for programs, in bytes."""
    out: dict[str, Any] = {"heading": head, "variants": {}}
    for row in rows:
        timeline = row.prediction.timeline
        peak = timeline.peak_event()
        out["variants"][row.name] = {
            "micro": row.micro,
            "predicted_bytes": row.prediction.peak_bytes,
            "by_phase": timeline.by_phase(),
            "by_kind": timeline.by_kind(peak),
            "by_module": [list(found) for found in timeline.by_module(peak)[:MODULES]],
            "largest_micro": row.largest,
            "fits": row.fits,
            "alike": row.alike or None,
            "measured": row.measured,
        }
    return out


def page(rows: Iterable[Row], head: str, notes: Iterable[str]) -> str:
    """One self-contained page: the table, and of each variant the chart of a step and what the peak is made of."""
    rows = list(rows)
    parts = [f"<!doctype html><meta charset=utf-8><title>Memory</title><style>{STYLE}</style><h1>Memory</h1>"]
    parts += [f"<p>{escape(head)}</p>", _html([HEADER, *(row.cells for row in rows)])]
    measured = measured_table(rows)
    if len(measured) > 1:
        parts += ["<h2>Predicted and measured</h2>", _html(measured)]
    for row in rows:
        parts.append(f"<h2>{escape(row.name)}</h2>")
        if row.alike:
            parts.append(f"<p>The same kernels as {escape(row.alike)}, so the same memory: see there.</p>")
            continue
        parts.append(
            svg(row.prediction.timeline, f"{row.name}: one step at micro-batch {row.micro}, predicted")
        )
        parts += [_html(kinds_table(row.prediction)), _html(modules_table(row.prediction))]
    parts += ["<h2>What is assumed</h2><ul>", *(f"<li>{escape(note)}</li>" for note in notes), "</ul>"]
    return "\n".join(parts)


def _html(rows: list[list[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return "<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in rows[0]) + f"</tr>{body}</table>"
