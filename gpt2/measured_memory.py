"""Measure the peak memory of one training step and one evaluation batch, by phase.

On a GPU or NPU the numbers come from the allocator. On a CPU torch's profiler observes the allocator. That is too slow
for a training run; gpt2.measured_memory measures runs.
"""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpt2.predicted_memory import StepWorkload
from gpt2.training_step import Stepper

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes(peak: bool) -> int:
    """Return the resident set of this process: the current one or its high-water mark."""
    if STATUS.exists():
        found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", STATUS.read_text())
        if found:
            return int(found.group(1)) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class PeakMeter:
    """Peaks of one process, in total and by phase. Create it before the model, so that the base is known."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.by_phase: dict[str, int] = {}
        # torch.cuda, torch.npu: the functions of the device's allocator
        self._module: Any = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        self._base = 0 if self._module else resident_bytes(peak=False)
        self._allocated = self._reserved = 0

    def _update(self) -> int:
        """Update the highest bytes. Returns the allocated peak since the last reset."""
        allocated: int
        if self._module:
            allocated = self._module.max_memory_allocated(self.device)
            reserved = self._module.max_memory_reserved(self.device)
        else:
            reserved = resident_bytes(peak=True)
            allocated = max(reserved - self._base, 0)
        self._allocated, self._reserved = max(self._allocated, allocated), max(self._reserved, reserved)
        return allocated

    def _reset(self) -> bool:
        """Reset the high-water mark; False if the system does not support it."""
        self._update()
        if self._module:
            self._module.reset_peak_memory_stats(self.device)
            return True
        try:
            CLEAR.write_text("5")  # see proc(5): resets VmHWM
        except OSError:
            return False
        return True

    def restart(self) -> None:
        """Drop the peaks before this call, if the system supports it. Phases that were measured remain."""
        if self._reset():
            self._allocated = self._reserved = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the peak bytes of the block as `by_phase[name]`; repeated phases keep the highest."""
        supported = self._reset()
        yield
        if supported:
            self.by_phase[name] = max(self._update(), self.by_phase.get(name, 0))

    def peaks(self) -> dict[str, int]:
        """Return {"allocated", "reserved"}: the highest bytes in this process so far, or since `restart`."""
        self._update()
        return {"allocated": self._allocated, "reserved": self._reserved}


def memory_entry(meter: PeakMeter, predicted_bytes: int | None) -> dict[str, Any]:
    """Return the record's `memory`: peaks in bytes, over all and by phase."""
    peaks = meter.peaks()
    phases = ("forward", "backward", "optimizer")
    return {
        "peak_allocated_bytes": peaks["allocated"],
        "peak_reserved_bytes": peaks["reserved"],
        "predicted_bytes": predicted_bytes,
        "by_phase": {name: meter.by_phase.get(name) for name in phases},
    }


# GLIBC_TUNABLES of a process that measures: every buffer of 64 KiB or more has its own pages, so that the resident set
# equals the allocated memory. A heap that reuses its buffers is faster and has a larger resident peak.
EXACT_HEAP = "glibc.malloc.mmap_threshold=65536"
HISTORY = 1_000_000  # allocator events in a snapshot; a step of GPT-2 124M has about ten thousand


@contextmanager
def snapshot(path: Path, device: str) -> Iterator[None]:
    """Record every allocation of the block on a GPU or NPU; write a file for pytorch.org/memory_viz.

    It has the stacks of Python alone: those of C++ take seconds to minutes to read.
    """
    memory = torch.get_device_module(device).memory
    memory._record_memory_history(max_entries=HISTORY, stacks="python")
    try:
        yield
        path.parent.mkdir(parents=True, exist_ok=True)
        memory._dump_snapshot(str(path))
    finally:
        memory._record_memory_history(enabled=None)


class AllocatorListener:
    """Peaks of torch's CPU allocator by phase, from torch's profiler; temporaries inside kernels are included.

    base: bytes allocated before. Enter it around the phases; `by_phase` has their peaks after it exits.
    """

    def __init__(self, base: int) -> None:
        self.base = base
        self.by_phase: dict[str, int] = {}
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )

    def __enter__(self) -> AllocatorListener:
        self._profile.__enter__()
        return self

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark the block as a phase."""
        with torch.profiler.record_function(f"phase:{name}"):
            yield

    def __exit__(self, *exc: object) -> None:
        self._profile.__exit__(*exc)
        assert self._profile.profiler is not None
        assert self._profile.profiler.kineto_results is not None
        events: list[Any] = list(self._profile.profiler.kineto_results.events())
        spans = [
            (event.start_ns(), event.end_ns(), event.name().removeprefix("phase:"))
            for event in events
            if event.name().startswith("phase:")
        ]
        total = self.base
        for at, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
            before, total = total, total + nbytes
            for name in {name for start, end, name in spans if start <= at <= end}:
                self.by_phase[name] = max(self.by_phase.get(name, 0), before, total)


def allocated_bytes(stepper: Stepper) -> int:
    """Sum the bytes of weights, buffers and optimizer state."""
    state = [value for row in stepper.optimizer.state.values() for value in row.values()]
    model = [*stepper.model.parameters(), *stepper.model.buffers()]
    tensors = [*model, *(value for value in state if isinstance(value, torch.Tensor))]
    return sum(tensor.nbytes for tensor in tensors)


@dataclass
class Measured:
    """Peak bytes that the allocator handed out, by phase, and that a GPU's allocator reserved, over all phases."""

    allocated: dict[str, int]
    reserved: dict[str, int]


def measure(work: StepWorkload, device: str, snapshot_path: Path | None = None) -> Measured:
    """Run the work and measure it. On a GPU use a new process: the allocator keeps memory that it reserved earlier."""
    stepper = work.prepare(device, work.compile)
    if torch.device(device).type == "cpu":
        with AllocatorListener(allocated_bytes(stepper)) as listener:
            work.run(stepper, listener)
        return Measured(listener.by_phase, {})
    meter = PeakMeter(device)
    meter.restart()
    with snapshot(snapshot_path, device) if snapshot_path else contextlib.nullcontext():
        work.run(stepper, meter)
    return Measured(meter.by_phase, {"all": meter.peaks()["reserved"]})
