"""Peak memory: measured by phase of a training step, and estimated before one is made.

On a GPU the numbers are the allocator's own. On a CPU the process's resident set is what there is: its high-water
mark, reset at each phase through /proc/self/clear_refs where the system has it; the share that the interpreter and
the libraries held before the model was built is not counted as allocated.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes(peak: bool) -> int:
    """Resident set of this process, now or at its high-water mark."""
    if STATUS.exists():
        found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", STATUS.read_text())
        if found:
            return int(found.group(1)) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class PeakMeter:
    """Peaks of one process, over all and by phase. Make it before the model, so that the base is known."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.by_phase: dict[str, int] = {}
        self._base = 0 if self.device.type == "cuda" else resident_bytes(peak=False)
        self._highest = {"allocated": 0, "reserved": 0}

    def _read(self) -> dict[str, int]:
        if self.device.type == "cuda":
            return {
                "allocated": torch.cuda.max_memory_allocated(self.device),
                "reserved": torch.cuda.max_memory_reserved(self.device),
            }
        peak = resident_bytes(peak=True)
        return {"allocated": max(peak - self._base, 0), "reserved": peak}

    def _keep(self) -> dict[str, int]:
        seen = self._read()
        self._highest = {name: max(value, seen[name]) for name, value in self._highest.items()}
        return seen

    def _reset(self) -> bool:
        """Begin a new high-water mark; False where the system does not offer it."""
        self._keep()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return True
        try:
            CLEAR.write_text("5")  # see proc(5): resets VmHWM
        except OSError:
            return False
        return True

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the peak of the block as `by_phase[name]`, in bytes; the highest of several counts."""
        works = self._reset()
        yield
        if works:
            self.by_phase[name] = max(self._keep()["allocated"], self.by_phase.get(name, 0))

    def peaks(self) -> dict[str, int]:
        """{"allocated", "reserved"}: the highest bytes seen in this process so far."""
        self._keep()
        return dict(self._highest)


def estimate_bytes(
    *,
    parameters: int,
    layers: int,
    width: int,
    padded_vocabulary: int,
    tokens: int,
    half: bool,
    attention_calls: int,
) -> int:
    """Bytes at the peak of a training step of `tokens` tokens, counted from what each operation keeps.

    Weights, gradient and AdamW's two moments are float32: 16 bytes a parameter, and 4 for the head's gradient
    while the loss is made (bounded by a full copy). Kept for backward a token and layer, in units of C channels:
    the two norms' inputs (float32, 8 bytes), then at 2 bytes (half) or 4: norm outputs 2, query-key-value 3,
    attention outputs and statistics 1 a call (and 1 for a mix), the wide layer before and after GELU 8. On top
    one chunk of logits with its gradient, and temporaries of one wide layer. A coarse count, meant to choose a
    micro-batch on the safe side.
    """
    element = 2 if half else 4
    mixing = attention_calls + (1 if attention_calls > 1 else 0)
    kept = tokens * layers * width * (8 + element * (2 + 3 + mixing + 8))
    chunk = min(tokens, 4096) * padded_vocabulary * (4 + 2 * element)
    temporaries = tokens * width * 4 * (4 + 2)
    return 20 * parameters + (2 * parameters if half else 0) + kept + chunk + temporaries
