"""Detect the step in which something goes wrong, from loss and gradient norm, before the update of that step.

    nan           loss or gradient norm is not finite
    spike:K       the loss is more than K robust standard deviations above the median of the last 16
    grad_norm:K   so is the logarithm of the gradient norm

The limits are those of numerics.diagnose.spikes: a norm counts from 10 times the median on.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numerics.diagnose.spikes import LOSS, NORM, Outlier
from numerics.monitor.targets import parse_triggers

QUANTITIES = {"spike": LOSS, "grad_norm": NORM}
TRIGGERED = "triggers.jsonl"  # of a run: {"step", "trigger", "reason", "checkpoint"}


@dataclass(frozen=True)
class Fired:
    """A trigger and its reason, at one step."""

    trigger: str
    step: int
    reason: str


class Triggers:
    """The rules of a run. `observe` every step in order; after a resume, also those before it."""

    def __init__(self, words: Sequence[str]) -> None:
        """words: NAME or NAME:K. NumericsError names one that cannot be used."""
        self.factors = parse_triggers(words)
        self.outliers = {
            name: Outlier(QUANTITIES[name], factor)
            for name, factor in self.factors.items()
            if name in QUANTITIES
        }

    def observe(self, step: int, loss: float, gradient_norm: float) -> list[Fired]:
        """Append a step. Returns the triggers that it fires."""
        values = {"spike": ("loss", loss), "grad_norm": ("gradient norm", gradient_norm)}
        bad = [f"{name} {value}" for name, value in values.values() if not math.isfinite(value)]
        found = [Fired("nan", step, bad[0])] if bad and "nan" in self.factors else []
        for trigger, outlier in self.outliers.items():
            name, value = values[trigger]
            if math.isfinite(value) and (value > 0 or not outlier.quantity.log):
                bound = outlier.observe(value)
                if bound is not None:
                    found.append(Fired(trigger, step, f"{name} {value:.4g}, above {bound:.4g}"))
        return found


def read_triggers(folder: Path) -> list[dict[str, Any]]:
    """Return the triggers in the folder of a monitor. Torn lines are left out."""
    try:
        lines = (folder / TRIGGERED).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for text in lines:
        with contextlib.suppress(ValueError):
            entry = json.loads(text)
            if isinstance(entry, dict) and isinstance(entry.get("step"), int) and "trigger" in entry:
                found.append(entry)
    return found
