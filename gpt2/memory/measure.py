"""Measure the peak memory of one training step and one evaluation batch, by phase.

On a GPU the numbers are the allocator's. On a CPU torch's allocator is observed through the profiler, which is too
slow for a run; `gpt2.train.peak_memory` has what a run records.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpt2.memory.workload import Work
from gpt2.train.peak_memory import PeakMeter
from gpt2.train.step import Stepper

HISTORY = 1_000_000  # allocator events that a snapshot keeps; a step of GPT-2 124M makes some ten thousand


@contextmanager
def snapshot(path: Path) -> Iterator[None]:
    """Record every allocation of the block on a GPU with its stack, into a file for pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(max_entries=HISTORY)
    try:
        yield
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


class AllocatorListener:
    """Peaks by phase of torch's CPU allocator, kernels' own temporaries included, through torch's profiler.

    base: bytes that are allocated already. Use as a context manager around the phases, which it then has the
    peaks of.
    """

    def __init__(self, base: int) -> None:
        self.base = base
        self.by_phase: dict[str, int] = {}
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )

    def __enter__(self) -> AllocatorListener:
        self._profile.__enter__()
        return self

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
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
    """Bytes of the weights and the optimizer's state, each storage once."""
    state = [value for row in stepper.optimizer.state.values() for value in row.values()]
    tensors = [*stepper.model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@dataclass
class Measured:
    """Peak bytes of a piece of work by phase. allocated: what the allocator gave out. resident: the process's.

    On a CPU resident is the growth of the resident set; on a GPU it is what the allocator reserved, over all phases.
    """

    allocated: dict[str, int] = field(default_factory=dict)
    resident: dict[str, int] = field(default_factory=dict)


def load_libraries(work: Work) -> None:
    """A step of a model of next to no size: what torch loads and sets up at the first use is not the work's."""
    small = dataclasses.replace(work.model, layers=1, heads=1, width=8, block_size=2)
    tiny = dataclasses.replace(work, model=small, attention=None, micro=1, accumulation=1)
    tiny.run(tiny.prepare("cpu"), PeakMeter("cpu"))


def measure(work: Work, device: str, snapshot_path: Path | None = None) -> Measured:
    """Make the work for real. Best in a fresh process: on a CPU the resident set remembers what was there before."""
    measured = Measured()
    gpu = torch.device(device).type == "cuda"
    if not gpu:
        load_libraries(work)
    meter = PeakMeter(device)
    stepper = work.prepare(device)
    with snapshot(snapshot_path) if gpu and snapshot_path else contextlib.nullcontext():
        work.run(stepper, meter)
    if gpu:
        measured.allocated = dict(meter.by_phase)
        measured.resident = {"all": meter.peaks()["reserved"]}
        return measured
    measured.resident = dict(meter.by_phase)
    with AllocatorListener(allocated_bytes(stepper)) as listener:
        work.run(stepper, listener)
    measured.allocated = listener.by_phase
    return measured
