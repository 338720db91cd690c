"""Tables and page of `make memory`: predicted and measured peaks by phase and kind."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.allocation_tracker import Timeline
from gpt2.measured_memory import measure
from gpt2.predicted_memory import Prediction
from ra.variants import Variant, variant
from referee.pages.document import (
    Block,
    BulletList,
    Document,
    Figure,
    Paragraph,
    Section,
    Table,
    render_terminal,
)
from referee.pages.figures import Plain, axis, figure, trace
from referee.pages.html_page import render_html
from referee.pages.markup import escape_html
from runtime import attention_kernels, resolved_target
from runtime.batch_plan import BatchPlan
from runtime.dotconfig import Symbols
from runtime.files import write_json, write_text
from runtime.gpu_specs import GIB, TargetError
from runtime.resolved_target import ResolvedTarget
from runtime.settings import Config, TargetConfig
from study.planning.micro_batch import MARGIN, Predictions

PHASES = ("forward", "backward", "optimizer", "evaluation")
COLUMNS = 900  # points of a curve
COLORS = {
    "parameters": "#4c6a92",
    "optimizer state": "#86a5c9",
    "gradients": "#c98b3f",
    "activations": "#5f9e6e",
    "temporaries": "#c0504d",
    "other": "#9a9a9a",
}
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
    size, unit = _unit(nbytes)
    return f"{nbytes / size:.2f} {unit}"


def _unit(nbytes: float) -> tuple[int, str]:
    return next((row for row in UNITS if nbytes >= row[0]), UNITS[-1])


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


def kinds_table(timeline: Timeline) -> Table:
    """Bytes allocated at the peak by kind."""
    peak = timeline.peak_event()
    rows = [[kind, format_bytes(nbytes)] for kind, nbytes in timeline.by_kind(peak).items() if nbytes]
    return Table([f"at the peak, in {timeline.phase_at(peak)}, by kind", "bytes"], rows)


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


# ---- document


def memory_document(rows: Sequence[MemoryRow], title: str, notes: Sequence[str]) -> Document:
    """Summary, measurements, then for each kind of variant the timeline of a step and the contents of its peak."""
    blocks: list[Block] = [summary_table(rows), Section("Predicted and measured", [measured_table(rows)])]
    for number, row in enumerate(rows):
        timeline = row.prediction.timeline
        if row.same_as:
            text = f"The same kernels as {row.same_as}, so the same memory: see {row.same_as}."
            blocks.append(Section(row.name, [Paragraph(text)]))
        else:
            about = (
                f"Predicted memory of one step at micro-batch {row.micro}, from the first allocation to the last. The "
                "horizontal axis counts allocations and frees; it is not time."
            )
            drawn = Figure(f"timeline{number}", timeline_figure(timeline), about)
            blocks.append(Section(row.name, [drawn, kinds_table(timeline)]))
    blocks.append(Section("Assumptions", [BulletList(notes)]))
    return Document("Memory", blocks, subtitle=title)


def timeline_figure(timeline: Timeline) -> Plain:
    """Allocated memory by kind as a stacked area over allocations and frees, with the phases and the peak."""
    first, last = timeline.phases[0][1], timeline.phases[-1][2]
    peak = timeline.peak_event()
    top = timeline.curve()[peak]
    size, unit = _unit(top)
    events = drawn_events(timeline, first, last)
    data = [
        trace(
            kind,
            mode="lines",
            line={"width": 0, "color": COLORS[kind], "shape": "hv"},
            x=events,
            y=[float(f"{values[event] / size:.5g}") for event in events],
            stackgroup="memory",
            fillcolor=COLORS[kind],
            hovertemplate=f"{kind}: %{{y:.4g}} {unit}<extra></extra>",
        )
        for kind, values in timeline.by_kind_over_time().items()
        if any(values[event] for event in events)
    ]
    soft = "var(--soft)"
    starts = [
        {"type": "line", "x0": start, "x1": start, "yref": "paper", "y0": 0, "y1": 1,
         "line": {"color": soft, "width": 1, "dash": "dot"}}
        for _, start, _ in timeline.phases
    ]  # fmt: skip
    notes: list[Plain] = [
        {"x": (start + end) / 2, "yref": "paper", "y": 0, "yanchor": "top", "text": escape_html(name),
         "showarrow": False, "font": {"color": soft, "size": 12}}
        for name, start, end in timeline.phases
        if end - start > 0.12 * (last - first)
    ]  # fmt: skip
    left, offset = ("right", -30) if peak - first > (last - first) / 2 else ("left", 30)
    label = f"peak {format_bytes(top)}, in {escape_html(timeline.phase_at(peak))}"
    arrow = {
        "ax": offset,
        "ay": -14,
        "arrowhead": 6,
        "arrowcolor": "var(--ink)",
        "bgcolor": "var(--page, 0.8)",
    }
    return figure(
        data,
        420,
        (62, 16, 40, 60),
        {"margin": {"l": 48, "r": 6}, "font": {"size": 11}, "height": 380},
        hovermode="x",
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": -0.14, "yanchor": "top"},
        xaxis={"range": [first, max(last, first + 1)], "showticklabels": False, "showgrid": False},
        yaxis=axis(unit, range=[0, 1.12 * top / size], nticks=8),
        shapes=starts,
        annotations=[*notes, {"x": peak, "y": top / size, "text": label, "xanchor": left} | arrow],
    )


def drawn_events(timeline: Timeline, first: int, last: int) -> list[int]:
    """One event for each column of the figure: the one with most bytes allocated, so that no peak is lost."""
    step = max(1, -(-(last - first + 1) // COLUMNS))
    curve = timeline.curve()
    return [
        max(range(at, min(at + step, last + 1)), key=curve.__getitem__) for at in range(first, last + 1, step)
    ]


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


# Predict the peak memory of a study's variants, measure it on the device itself, and write the page.


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
