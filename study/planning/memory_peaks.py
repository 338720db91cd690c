"""Predict the peak memory of a study's variants, measure it on the device itself, and write the page."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2.measured_memory import measure
from ra.arms import AlternationSettings
from ra.variants import Variant, variant
from referee.pages.document import Document, render_terminal
from referee.pages.html_page import render_html
from runtime import attention_kernels, resolved_target
from runtime.dotconfig import Symbols
from runtime.files import write_json, write_text
from runtime.gpu_specs import TargetError
from runtime.settings import Config, TargetConfig
from study.planning.memory_page import MemoryRow, as_json, heading, memory_document
from study.planning.micro_batch import MARGIN, Predictions

NOTES = (
    "One optimizer step in its steady state and one evaluation batch are predicted. The real model, attention, loss "
    "and optimizer run on tensors without memory. Nothing is extrapolated.",
    "The step is not compiled. torch.compile fuses elementwise operations and saves fewer tensors.",
    "On a GPU the fused attention kernels are assumed to save the tensors of flash attention: q, k, v, the output in "
    "its own format, and a float32 number for each row and head.",
    "Peak allocated memory is compared. The CUDA context and the allocator's reserve beyond it come out of the margin.",
)


def report_memory(
    symbols: Symbols, study: Sequence[str], names: Sequence[str], folder: Path, planning: bool
) -> None:
    """Predict one target, measure it if it is this machine, print the tables and write the page in `folder`.

    study: its variants, for which the batch is planned. names: of the variants to show. planning: never measure.
    """
    config = Config.from_symbols(symbols)
    resolved, here = _resolve(config.target, planning)
    alternation = AlternationSettings.from_symbols(symbols)
    variants = [variant(name, config.model, alternation) for name in names]
    predictions = Predictions(config, resolved)
    batch = predictions.choose_batch(variant(name, config.model, alternation) for name in study)
    title = heading(resolved, batch, config.model.size, predictions.usable_bytes, MARGIN)
    print(title, flush=True)
    rows = predict_rows(predictions, variants, batch.micro)
    if here:
        resolved_target.export_environment(config.target.name)  # for the processes that measure
        for row in rows:
            if not row.same_as:
                row.measured = _measure_in_process(row.name, row.micro)
    document = memory_document(rows, title, NOTES)
    print(render_terminal(Document("", document.blocks[1::-1])))  # the summary is last
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{resolved.target.name}.json", as_json(rows, title))
    write_text(folder / f"{resolved.target.name}.html", render_html(document))
    print(f"\ncharts: {folder / resolved.target.name}.html\n", flush=True)


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


def measure_variant(
    symbols: Symbols, name: str, micro: int, folder: Path, eager: bool = False
) -> dict[str, Any]:
    """Measure a variant in this process; on a GPU also write a snapshot for pytorch.org/memory_viz to `folder`.

    The step is compiled if that is configured, and not `eager`.
    """
    config = Config.from_symbols(symbols)
    resolved = attention_kernels.prepare_device(config.target, config.model)
    chosen = variant(name, config.model, AlternationSettings.from_symbols(symbols))
    work = Predictions(config, resolved).work_at(chosen, micro)
    work = dataclasses.replace(work, compile=work.compile and not eager)
    path = folder / f"{resolved.target.name}-{name}.pickle"
    with attention_kernels.attention_context(resolved, config.model.dropout):
        return dataclasses.asdict(measure(work, resolved.device, path))
