"""Tables and page of `make memory`: predicted and measured peaks by phase and kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpt2.allocation_tracker import Timeline
from gpt2.predicted_memory import Prediction
from referee.pages.document import Block, BulletList, Document, Figure, Paragraph, Section, Table
from referee.pages.figures import Plain, axis, figure, trace
from referee.pages.markup import escape_html
from runtime.gpu_specs import GIB
from runtime.resolved_target import ResolvedTarget
from runtime.run_plan import BatchPlan

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
