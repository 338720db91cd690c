"""Whether two ways of making a step train alike: their loss curves, seed by seed. Needs no torch.

With one seed both ways start from the same weights and see the same batches, so that what differs is arithmetic; two
seeds start from different weights, and what differs between them is the noise that an experiment has anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from study.stats.statistics import CONFIDENCE, Interval, mean, mean_interval, sum_of_squares

END = 10  # the last tenth of the steps is the end of a curve


@dataclass(frozen=True)
class Pair:
    """Training losses in nats of one seed, a step each: ours and the other's, as many."""

    seed: int
    ours: Sequence[float]
    other: Sequence[float]


@dataclass(frozen=True)
class Comparison:
    """difference: ours - the other's at the end, with the t interval over the seeds. noise: standard deviation of a
    loss at the end among seeds, pooled over both ways. dof: of the noise; ways that train alike tell the same of
    it, so that it is that of one."""

    difference: Interval
    noise: float
    dof: int

    @property
    def equal(self) -> bool:
        """Whether the whole interval is within the measured noise of one run, taken for the true one.

        That takes more than not differing from 0.
        """
        low, high = self.difference.low, self.difference.high
        return low is not None and high is not None and -self.noise <= low and high <= self.noise


def end(losses: Sequence[float]) -> float:
    """The mean of the last steps' losses."""
    return mean(losses[-max(1, len(losses) // END) :])


def compare(pairs: Sequence[Pair]) -> Comparison:
    """ValueError with fewer than two seeds, which have no noise."""
    if len(pairs) < 2:
        raise ValueError(f"{len(pairs)} seeds; right: at least 2")
    ends = [[end(pair.ours) for pair in pairs], [end(pair.other) for pair in pairs]]
    squares = math.fsum(sum_of_squares(way) for way in ends)
    differences = [ours - other for ours, other in zip(*ends, strict=True)]
    return Comparison(mean_interval(differences), math.sqrt(squares / (2 * (len(pairs) - 1))), len(pairs) - 1)


def rows(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """The curves at some steps, 1, 2, 5, 10 ... and the last. ours and other: means over the seeds; difference: the
    largest of any seed between the two ways; seeds: the largest between two seeds of one way. In nats."""
    last = len(pairs[0].ours)
    places = sorted({place for k in range(7) for n in (1, 2, 5) if (place := n * 10**k) < last} | {last})
    found = []
    for place in places:
        ours = [pair.ours[place - 1] for pair in pairs]
        other = [pair.other[place - 1] for pair in pairs]
        found.append(
            {
                "step": place,
                "ours": mean(ours),
                "other": mean(other),
                "difference": max(abs(one - two) for one, two in zip(ours, other, strict=True)),
                "seeds": max(max(ours) - min(ours), max(other) - min(other)),
            }
        )
    return found


def verdict(found: Comparison, seeds: int) -> str:
    """What the comparison allows one to say, in a line."""
    interval = found.difference
    told = (
        f"ours - plain over the last tenth of the steps: {interval.mean:+.2g} nats [{interval.low:+.2g}, "
        f"{interval.high:+.2g}] ({CONFIDENCE:.0%} interval, {seeds} seeds); a seed's noise, measured with "
        f"{found.dof} degrees of freedom: {found.noise:.2g}"
    )
    said = "equal within noise" if found.equal else "NOT shown to be equal within noise"
    return f"{told}: {said}"


def text(found: Sequence[dict[str, Any]]) -> str:
    """The table as it is printed."""
    lines = ["  step      ours     plain  largest difference  between seeds"]
    lines += [
        f"{row['step']:6d}  {row['ours']:8.4f}  {row['other']:8.4f}  {row['difference']:18.1e}  {row['seeds']:13.1e}"
        for row in found
    ]
    return "\n".join(lines)
