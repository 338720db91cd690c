"""The tables of `make memory`: predicted and measured peaks by phase and kind."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.allocation_tracker import KINDS
from gpt2.measured_memory import measure
from gpt2.predicted_memory import Prediction
from ra.variants import Variant, variant
from referee.pages.document import (
    Block,
    Document,
    Section,
    Table,
    render_terminal,
)
from runtime import attention_kernels, resolved_target
from runtime.batch_plan import BatchPlan
from runtime.dotconfig import Symbols
from runtime.files import write_json
from runtime.gpu_specs import GIB, TargetError
from runtime.resolved_target import ResolvedTarget
from runtime.settings import Config, TargetConfig
from study.planning.micro_batch import MARGIN, Predictions

PHASES = ("forward", "backward", "optimizer", "evaluation")
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass
class MemoryRow:
    """One variant at one micro-batch on one target.

    largest: the largest micro-batch that fits. same_as: the variant with the same kernels whose prediction this is.
    measured: bytes by method ("allocated", "reserved") and phase.
    """

    name: str
    micro: int
    prediction: Prediction
    largest: int
    fits: bool
    same_as: str = ""
    measured: dict[str, dict[str, int]] | None = None


def format_bytes(nbytes: float) -> str:
    """Bytes in the unit that suits their size, such as 12.34 GiB."""
    size, unit = next((row for row in UNITS if nbytes >= row[0]), UNITS[-1])
    return f"{nbytes / size:.2f} {unit}"


def heading(resolved: ResolvedTarget, batch: BatchPlan, size: str, usable: int, margin: float) -> str:
    """The target, the model and the planned batch in one line. usable: bytes of a process, without the margin."""
    ranks, each = (f" x {batch.world_size} ranks", " a rank") if batch.world_size > 1 else ("", "")
    return (
        f"{resolved.target.name} ({resolved.device_name}, {resolved.memory_bytes / GIB:.2f} GiB, {resolved.dtype}): "
        f"GPT-2 {size}, sequences of {batch.block_size}; plan: micro-batch {batch.micro} x {batch.accumulation}{ranks} "
        f"= {batch.effective} sequences; usable {usable / GIB:.2f} GiB{each}, {margin:.0%} reserved"
    )


# ---- tables


def summary_table(rows: Iterable[MemoryRow]) -> Table:
    """Predicted peaks of each variant, in all and by phase."""
    cells = []
    for row in rows:
        peaks = row.prediction.timeline.by_phase()
        bytes_of = [row.prediction.peak_bytes, *(peaks[phase] for phase in PHASES)]
        fits = "yes" if row.fits else "NO"
        cells.append([row.name, str(row.micro), *map(format_bytes, bytes_of), str(row.largest), fits])
    return Table(["variant", "micro", "peak", *PHASES, "largest micro", "fits"], cells)


def kinds_table(rows: Iterable[MemoryRow]) -> Table:
    """Bytes allocated at the peak of each variant, by kind, and the phase of the peak."""
    cells = []
    for row in rows:
        timeline = row.prediction.timeline
        peak = timeline.peak_event()
        kinds = timeline.by_kind(peak)
        cells.append([row.name, timeline.phase_at(peak), *(format_bytes(kinds[kind]) for kind in KINDS)])
    return Table(["at the peak", "phase", *KINDS], cells, (1,))


def measured_table(rows: Iterable[MemoryRow]) -> Table:
    """Predicted beside measured peaks by phase. The error is the prediction's."""
    cells = []
    for row in rows:
        predicted = row.prediction.timeline.by_phase() | {"all": row.prediction.peak_bytes}
        measured = row.measured if row.measured and not row.same_as else {}
        for phase in (*PHASES, "all"):
            found = [measured.get(method, {}).get(phase) for method in ("allocated", "reserved")]
            if any(found):
                cells.append([row.name, phase, format_bytes(predicted[phase])])
                for nbytes in found:
                    cells[-1] += (
                        [format_bytes(nbytes), f"{predicted[phase] / nbytes - 1:+.1%}"]
                        if nbytes
                        else ["", ""]
                    )
    headings = ["variant", "phase", "predicted", "allocated", "error", "reserved", "error"]
    return Table(headings, cells, (1,))


def as_json(rows: Iterable[MemoryRow], title: str) -> dict[str, Any]:
    """The same numbers for programs, in bytes."""
    out: dict[str, Any] = {"heading": title, "variants": {}}
    for row in rows:
        timeline = row.prediction.timeline
        out["variants"][row.name] = {
            "micro": row.micro,
            "predicted_bytes": row.prediction.peak_bytes,
            "by_phase": timeline.by_phase(),
            "by_kind": timeline.by_kind(timeline.peak_event()),
            "largest_micro": row.largest,
            "fits": row.fits,
            "same_as": row.same_as or None,
            "measured": row.measured,
        }
    return out


# Predict the peak memory of a study's variants, and measure it on the device itself.


def report_memory(
    symbols: Symbols, study: Sequence[str], names: Sequence[str], folder: Path, planning: bool
) -> None:
    """Predict one target, measure it if it is this machine, print the tables and write them in `folder`.

    study: its variants, for which the batch is planned. names: of the variants to show. planning: never measure.
    """
    config = Config.from_symbols(symbols)
    resolved, here = _resolve(config.target, planning)
    variants = [variant(name, config.model, config.alternation) for name in names]
    predictions = Predictions(config, resolved)
    batch = predictions.choose_batch(variant(name, config.model, config.alternation) for name in study)
    title = heading(resolved, batch, config.model.size, predictions.usable_bytes, MARGIN)
    print(title, flush=True)
    rows = predict_rows(predictions, variants, batch.micro)
    if here:
        resolved_target.export_environment(config.target.name)  # for the processes that measure
        for row in rows:
            if not row.same_as:
                row.measured = _measure_in_process(row.name, row.micro)
    tables: list[Block] = [
        Section("Predicted and measured", [measured_table(rows)]),
        kinds_table(row for row in rows if not row.same_as),
        summary_table(rows),
    ]
    print(render_terminal(Document("", tables)))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{resolved.target.name}.json"
    write_json(path, as_json(rows, title))
    print(f"\nnumbers: {path}\n", flush=True)


def _resolve(target: TargetConfig, planning: bool) -> tuple[resolved_target.ResolvedTarget, bool]:
    """The target, and whether it is this machine."""
    if planning:
        return resolved_target.resolve(target, planning=True), False
    try:
        return resolved_target.resolve(target), True
    except TargetError as error:
        print(f"predicted only: {error}")
        return resolved_target.resolve(target, planning=True), False


def predict_rows(predictions: Predictions, variants: Sequence[Variant], micro: int) -> list[MemoryRow]:
    """A row of each variant that can be predicted; the reason is printed for the others."""
    rows: list[MemoryRow] = []
    first: dict[str, str] = {}
    for each in variants:
        if each.cost_class not in first:
            print(f"predicting {each.name} ...", flush=True)
        reason = predictions.unpredictable(each, micro)
        if reason:
            print(reason)
            continue
        same = first.setdefault(each.cost_class, each.name)
        prediction, largest = predictions.of(each, micro), predictions.largest_micro(each)
        fits, same_as = predictions.fits(each, micro), "" if same == each.name else same
        rows.append(MemoryRow(each.name, micro, prediction, largest, fits, same_as))
    return rows


# ---- measuring


def _measure_in_process(name: str, micro: int) -> dict[str, dict[str, int]] | None:
    """Bytes by method and phase, measured in a new process; None if it fails, and the reason is printed."""
    print(f"measuring {name} ...", flush=True)
    command = [sys.executable, "-m", "scripts.memory", "--measure", name, "--micro", str(micro)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"measuring {name} failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
        return None
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_variant(symbols: Symbols, name: str, micro: int, snapshots: Path | None = None) -> dict[str, Any]:
    """Measure a variant in this process.

    snapshots: the step is compiled if that is configured, and on a GPU a snapshot for pytorch.org/memory_viz is written
    to this folder; None: it is not compiled, and none is written.
    """
    config = Config.from_symbols(symbols)
    resolved = attention_kernels.prepare_device(config.target, config.model)
    chosen = variant(name, config.model, config.alternation)
    work = Predictions(config, resolved).work_at(chosen, micro)
    work = dataclasses.replace(work, compile=work.compile and snapshots is not None)
    path = snapshots / f"{resolved.target.name}-{name}.pickle" if snapshots else None
    with attention_kernels.attention_context(resolved, config.model.dropout):
        return dataclasses.asdict(measure(work, resolved.device, path))
