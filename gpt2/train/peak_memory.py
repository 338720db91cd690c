"""Measure peak memory of a process, in total and by phase of a training step.

On a GPU or NPU the numbers come from the allocator. On a CPU they are the resident set's high-water mark, reset at each
phase through /proc/self/clear_refs where available. Memory of the interpreter and the libraries before the model is not
counted as allocated.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

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
