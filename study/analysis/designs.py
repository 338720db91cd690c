"""The effect that a number of control arms and seeds detects, and the cheapest such design. Needs no torch.

A design is one judged arm against the mean of k control arms, at S seeds. The test is the paired t test of
`study.analysis.verdict`, at the level of its only look.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from referee.verdict.looks import nominal_levels
from referee.verdict.power import mde, seeds_for
from referee.verdict.statistics import spread_interval
from study.analysis.verdict import VERDICT_SEEDS

MOST_CONTROLS = 5  # B and four fixed patterns


@dataclass(frozen=True)
class Noise:
    """Standard deviations (nats) of one run at one seed: of the judged arm, and of a control arm.

    dof: degrees of freedom of the estimate; None for a value that was given.
    """

    arm: float
    control: float
    dof: int | None = None

    @classmethod
    def of_both(cls, sigma: float, dof: int | None = None) -> Noise:
        """The judged arm varies like a control arm."""
        return cls(sigma, sigma, dof)

    @classmethod
    def from_differences(cls, spread: float, controls: float, sigma: float, dof: int) -> Noise:
        """Separate the arm's part from the spread of its differences to the mean of the control arms.

        controls: arms in that mean, harmonic mean over seeds. sigma: of one control arm; dof: of the differences.
        """
        return cls(math.sqrt(max(spread**2 - sigma**2 / controls, 0.0)), sigma, dof)

    def spread(self, controls: int) -> float:
        """Standard deviation of one seed's difference to the mean of `controls` control arms."""
        return math.sqrt(self.arm**2 + self.control**2 / controls)

    def bounds(self) -> tuple[Noise, Noise]:
        """The noise at the ends of its 95 % interval; itself twice for a value that was given."""
        if self.dof is None:
            return self, self
        low, high = (Noise(self.arm * end, self.control * end) for end in spread_interval(1.0, self.dof))
        return low, high


def only_look(seeds: int) -> float:
    """Return the level of the t test in a study that is judged once, at these seeds."""
    return nominal_levels((seeds,))[0]


def detectable_difference(noise: Noise, controls: int, seeds: int, level: float | None = None) -> float:
    """Return the difference (nats) that a study of at least two seeds detects with 80 % power.

    level: of the t test; by default that of the only look.
    """
    return mde(noise.spread(controls), seeds, only_look(seeds) if level is None else level)


@dataclass(frozen=True)
class StudyDesign:
    """Control arms and seeds, and the cost in runs. sees: the difference (nats) that is detected with 80 % power."""

    controls: int
    seeds: int
    runs: int
    sees: float


def cheapest_design(noise: Noise, effect: float, runs: Callable[[int, int], int]) -> StudyDesign | None:
    """Return the design of the fewest runs that detects `effect` (nats); None beyond 1,000 seeds.

    runs: of a number of control arms and of seeds; more of either is never cheaper. Of equal designs the one with the
    fewest control arms is returned.
    """
    found = []
    for controls in range(1, MOST_CONTROLS + 1):
        seeds = seeds_for(noise.spread(controls), effect, VERDICT_SEEDS, only_look)
        if seeds is not None:
            sees = detectable_difference(noise, controls, seeds)
            found.append(StudyDesign(controls, seeds, runs(controls, seeds), sees))
    return min(found, key=lambda one: (one.runs, one.controls), default=None)
