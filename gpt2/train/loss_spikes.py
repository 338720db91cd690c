"""Detect loss spikes: losses far above a robust running scale. They are recorded, never skipped.

The scale is the median absolute difference of successive losses, as a normal distribution's standard deviation (von
Neumann's successive differences, with the median for robustness). A falling loss or a single spike hardly changes it.
The expected loss is the median of the last few.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median

WINDOW = 64  # losses that the scale is computed from
MIN_LOSSES = 16  # before the first spike is reported
RECENT = 16  # losses whose median is the expected loss
LIMIT = 8.0  # standard deviations above the expected loss
# standard deviation over the median absolute successive difference, for a normal distribution
NORMAL = 1.4826 / 2**0.5
MIN_SCALE = 0.02  # nats; the least scale, however quiet the losses are


class SpikeDetector:
    """Detector of spikes over the last losses, in nats. The checkpoint must save `losses`."""

    def __init__(self, losses: Sequence[float] = ()) -> None:
        self.losses = list(losses)[-WINDOW:]

    def observe(self, loss: float) -> float | None:
        """Append `loss`; return the expected loss if `loss` is a spike, else None."""
        expected = None
        if len(self.losses) >= MIN_LOSSES:
            center = median(self.losses[-RECENT:])
            steps = (abs(after - before) for before, after in itertools.pairwise(self.losses))
            scale = max(NORMAL * median(steps), MIN_SCALE)
            expected = center if loss > center + LIMIT * scale else None
        self.losses = [*self.losses, loss][-WINDOW:]
        return expected


def spike_summary(spikes: Sequence[Sequence[float]]) -> str | None:
    """Return a note on the spikes [iteration, loss, expected loss] of a run; None without any."""
    if not spikes:
        return None
    iteration, loss, expected = max(spikes, key=lambda spike: spike[1] - spike[2])
    return f"{len(spikes)} loss spikes; the largest at iteration {iteration}: {loss:.2f}, expected {expected:.2f}"
