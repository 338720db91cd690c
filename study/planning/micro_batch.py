"""Predict the memory of a study's variants on a device, and choose the micro-batch from it.

The batch is planned from the device's total memory, never from its free memory: another process must not change an
experiment. Too little free memory at the start of a run is a separate error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.predicted_memory import Prediction, StepWorkload, predict
from runtime.batch_plan import BatchPlan, largest_micro_batch, next_smaller, plan_batch, plan_for
from runtime.errors import UserError
from runtime.gpu_specs import GIB
from runtime.resolved_target import ResolvedTarget
from runtime.settings import MICRO_TOKENS, Config

if TYPE_CHECKING:
    from ra.variants import Variant

# Share of the device's memory that is reserved: for the CUDA context (about half a GiB), for the allocator's reserve
# beyond its peak, and for the error of the prediction.
MARGIN = 0.10
_PREDICTIONS: dict[tuple[Any, ...], Prediction] = {}  # by everything that a prediction depends on
MEMINFO = Path("/proc/meminfo")
# the command that lists the processes of a device
LISTED_BY = {
    "cuda": "nvidia-smi",
    "rocm": "rocm-smi --showpids",
    "npu": "npu-smi info",
    "cpu": "top",
}


class MemoryPlanError(UserError, RuntimeError):
    """The device has too little memory."""


class Predictions:
    """Predict the peaks of variants on one target. Variants of one cost class share a prediction.

    processes: that share the device's memory: those of `runs` at once, and on a CPU the ranks of each.
    """

    def __init__(self, config: Config, resolved: ResolvedTarget, runs: int = 1) -> None:
        self.config, self.resolved = config, resolved
        self.processes = runs * (config.target.ranks if resolved.device_type == "cpu" else 1)
        self.usable_bytes = int(resolved.memory_bytes * (1 - MARGIN) / self.processes)
        self._failed: dict[str, str] = {}  # cost class -> why it cannot be predicted

    def work_at(self, variant: Variant, micro: int) -> StepWorkload:
        """Workload of `micro` sequences at a time; two micro-batches if `micro` does not divide the batch."""
        config, share = self.config, self.config.batch.effective // self.config.target.ranks
        accumulation = 2 if share % micro else share // micro
        device = (self.resolved.target.kind, self.resolved.dtype, config.target.compile)
        return StepWorkload(variant.model, config.optimizer, variant.parts, micro, accumulation, *device)

    def of(self, variant: Variant, micro: int) -> Prediction:
        """Predict a step of `micro` sequences at a time, once."""
        work = self.work_at(variant, micro)
        shape = (work.model, micro, work.batch.accumulation)
        key = (*shape, variant.cost_class, work.kind, work.dtype, work.compile)
        if key not in _PREDICTIONS:
            _PREDICTIONS[key] = predict(work)
        return _PREDICTIONS[key]

    def peak_bytes(self, variant: Variant, micro: int) -> int:
        return self.of(variant, micro).peak_bytes

    def fits(self, variant: Variant, micro: int) -> bool:
        return self.peak_bytes(variant, micro) <= self.usable_bytes

    def fit_together(self, variants: Sequence[Variant], micro: int) -> bool:
        """Whether one model of each variant fits at the same time."""
        if any(self.unpredictable(variant, micro) for variant in variants):
            return False
        return sum(self.peak_bytes(variant, micro) for variant in variants) <= self.usable_bytes

    def largest_micro(self, variant: Variant) -> int:
        """The largest micro-batch that is predicted to fit, divisor or not; 0 if one sequence does not fit.

        From two chunks of the loss on, memory is a convex, piecewise linear function of the micro-batch. The search
        follows its chords. The last micro-batch that fits and the first that does not are both predicted.
        """
        if not self.fits(variant, 1):
            return 0
        most = (
            self.config.batch.effective // self.config.target.ranks
        )  # more at a time would be another experiment
        low, high = 1, max(2, min(4, most))
        while self.fits(variant, high):
            if high >= most:
                return most
            before, low = low, high
            # at most four times as many: at first the evaluation may need more than a step, and the line is flat
            high = min(max(low + 1, self._along(variant, before, low) + 1), 4 * low, most)
        while high - low > 1:
            middle = min(max(self._along(variant, low, high), low + 1), high - 1)
            if self.fits(variant, middle):
                low = middle
            else:
                high = middle
        return low

    def _along(self, variant: Variant, first: int, second: int) -> int:
        """The last micro-batch that fits on the line through the predictions of these two."""
        base = self.peak_bytes(variant, first)
        rise = max(self.peak_bytes(variant, second) - base, 1) / (second - first)
        return first + int((self.usable_bytes - base) / rise)

    def unpredictable(self, variant: Variant, micro: int) -> str:
        """Why the step of a variant cannot run on fake tensors; empty if it can."""
        if variant.cost_class not in self._failed:
            try:
                self.of(variant, micro)
            except Exception as error:  # a custom variant may raise anything
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                text = f"the memory of {variant.name} cannot be predicted ({reason})"
                self._failed[variant.cost_class] = text
        return self._failed.get(variant.cost_class, "")

    def choose_batch(self, variants: Iterable[Variant], existing: BatchPlan | None = None) -> BatchPlan:
        """The configured micro-batch, or the largest exact one that is predicted to fit every variant.

        existing: the batch of an existing plan. It is never increased, and a configured one is not reduced.
        """
        effective, block_size = self.config.batch.effective, self.config.model.block_size
        ranks = self.config.target.ranks
        existing = plan_for(existing, ranks) if existing else None
        if self.config.batch.micro:
            return existing or plan_batch(effective, self.config.batch.micro, ranks, block_size)
        kind = "cpu" if self.resolved.target.kind == "cpu" else "gpu"
        most = max(1, MICRO_TOKENS[kind] // block_size)
        batch = existing or plan_batch(
            effective, largest_micro_batch(effective, ranks, most), ranks, block_size
        )
        for variant in {variant.cost_class: variant for variant in variants}.values():
            while not self.unpredictable(variant, batch.micro) and not self.fits(variant, batch.micro):
                smaller = next_smaller(batch)
                if smaller is None:
                    raise MemoryPlanError(self._too_large(variant))
                batch = smaller
        return batch

    def _too_large(self, variant: Variant) -> str:
        model, device = self.config.model, self.resolved
        shared = f" for {self.processes} processes" if self.processes > 1 else ""
        fewer = ", or fewer CONFIG_RANKS or CONFIG_SLOTS" if shared else ""
        return (
            f"{variant.name} of size {model.size} with block size {model.block_size} needs "
            f"{self.peak_bytes(variant, 1) / GIB:.1f} GiB for one sequence; {device.device_name} has "
            f"{device.memory_bytes / GIB:.1f} GiB{shared}, {MARGIN:.0%} of it reserved; fix: choose a smaller "
            f"CONFIG_GPT2_MODEL_* or CONFIG_GPT2_BLOCK_SIZE{fewer}"
        )


def free_bytes(device: str) -> int | None:
    """Free memory of the device; None if it is unknown."""
    if device != "cpu":
        import torch

        return int(torch.get_device_module(device).mem_get_info(device)[0])
    text = MEMINFO.read_text() if MEMINFO.exists() else ""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def require_free(resolved: ResolvedTarget, need_bytes: int | None, free: int | None) -> None:
    """MemoryPlanError if less than the run's predicted peak is free. The batch is not changed."""
    if need_bytes is None or free is None or free >= need_bytes:
        return
    listed = LISTED_BY[resolved.target.kind]
    raise MemoryPlanError(
        f"{resolved.device_name}: {free / GIB:.1f} of {resolved.memory_bytes / GIB:.1f} GiB are free, and the run "
        f"needs {need_bytes / GIB:.1f} GiB: another process uses the rest ({listed} lists them). The micro-batch "
        "is not reduced, so that the experiment stays the same; fix: wait for that process or stop it"
    )
