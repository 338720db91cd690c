"""Loss spikes: losses far above a running robust scale, put on record and never skipped.

The scale is the median of the absolute differences of successive losses, as a normal distribution's standard
deviation (von Neumann's successive differences, with the median for robustness): a falling loss hardly moves it, and
neither does a spike. What a loss is compared with is the median of the last few.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median

WINDOW = 64  # losses that the scale is taken over
LEAST = 16  # losses before anything is called a spike
RECENT = 16  # losses whose median is what the next one is expected to be
LIMIT = 8.0  # standard deviations above it
NORMAL = (
    1.4826 / 2**0.5
)  # of a normal distribution: standard deviation / median absolute successive difference
SMALLEST = 0.02  # nats: what is closer than LIMIT times this is none, however quiet the losses were


class SpikeWatch:
    """The last losses in nats, and whether the next one is a spike. Its state belongs into the checkpoint."""

    def __init__(self, losses: Sequence[float] = ()) -> None:
        self.losses = list(losses)[-WINDOW:]

    def spike(self, loss: float) -> float | None:
        """The loss that was to be expected where `loss` lies far above it, or None; `loss` joins the last losses."""
        expected = None
        if len(self.losses) >= LEAST:
            centre = median(self.losses[-RECENT:])
            steps = (abs(after - before) for before, after in itertools.pairwise(self.losses))
            scale = max(NORMAL * median(steps), SMALLEST)
            expected = centre if loss > centre + LIMIT * scale else None
        self.losses = [*self.losses, loss][-WINDOW:]
        return expected
