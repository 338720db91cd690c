"""Detect loss spikes: losses far above a robust running scale (spikes.py). Recorded, never skipped."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from referee.numerics.diagnose.spikes import LOSS, RECENT, Outlier


class SpikeDetector:
    """Detector of spikes over the last losses, in nats. The checkpoint must save `losses` and `spikes`.

    spikes: [iteration, loss, expected loss].
    """

    def __init__(self, losses: Sequence[float] = (), spikes: Sequence[list[float]] = ()) -> None:
        self._outlier = Outlier(LOSS, values=losses)
        self.spikes = list(spikes)

    @property
    def losses(self) -> list[float]:
        return list(self._outlier.values)

    def observe(self, loss: float) -> float | None:
        """Append `loss`; return the expected loss, the median of the last few, if `loss` is a spike, else None."""
        recent = self.losses[-RECENT:]
        return None if self._outlier.observe(loss) is None else median(recent)

    def summary(self, warmup: int) -> str | None:
        """Return a note on the spikes after the warm-up iterations, where a loss often rises; None without any."""
        spikes = [spike for spike in self.spikes if spike[0] > warmup]
        if not spikes:
            return None
        iteration, loss, expected = max(spikes, key=lambda spike: spike[1] - spike[2])
        largest = f"{iteration}: {loss:.2f}, expected {expected:.2f}"
        return f"loss spikes: {len(spikes)}; the largest at iteration {largest}"
