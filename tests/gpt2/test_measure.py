"""Measured memory: by phase, peaks without allocations from before."""

import mmap

import torch

from gpt2.measured_memory import AllocatorListener, PeakMeter, allocated_bytes
from gpt2.predicted_memory import StepWorkload
from runtime.settings import ModelConfig, OptimizerConfig

MIB = 2**20
WORK = StepWorkload(
    ModelConfig("test", 2, 2, 32, 16, 0.0, vocabulary=300, padded_vocabulary=384),
    OptimizerConfig(6e-4, 0.1, 0.02, 0.1, 0.9, 0.95, 1e-8, 1.0),
    None, 3, 2, "cpu", "float32",
)  # fmt: skip


def touch(megabytes: int) -> None:
    """Write to new pages for a moment. `torch.ones` may reuse memory that the heap kept from an earlier test."""
    torch.frombuffer(mmap.mmap(-1, megabytes * MIB), dtype=torch.uint8).fill_(1)


def test_the_resident_set_of_a_phase_includes_memory_touched_in_it() -> None:
    meter = PeakMeter("cpu")
    with meter.phase("small"):
        touch(4)
    with meter.phase("large"):
        touch(256)
    with meter.phase("small again"):
        touch(4)
    assert meter.by_phase["large"] >= 200 * MIB
    assert meter.by_phase["small again"] < 100 * MIB
    assert meter.peaks()["allocated"] >= meter.by_phase["large"]


def test_the_allocators_peak_is_that_of_the_phase_and_counts_the_base() -> None:
    with AllocatorListener(1000) as listener:
        with listener.phase("one"):
            a = torch.ones(MIB)
            del a
        with listener.phase("two"):
            torch.ones(1024)
    assert listener.by_phase == {"one": 1000 + 4 * MIB, "two": 1000 + 4096}


def test_weights_and_optimizer_state_count_each_storage_once() -> None:
    stepper = WORK.prepare("cpu")
    numbers = sum(parameter.numel() for parameter in stepper.model.parameters())
    steps = 4 * len(list(stepper.model.parameters()))  # AdamW's step counters
    assert allocated_bytes(stepper) == 3 * 4 * numbers + steps
