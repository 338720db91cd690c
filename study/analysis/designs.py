"""The effect that a number of control arms and seeds detects, and the cheapest such design. Needs no torch.

A design is one judged arm against the mean of k control arms, at S seeds. The test is the paired t test of
`study.analysis.verdict`, at the level of its only look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from referee.verdict.looks import nominal_levels
from referee.verdict.power import mde, seeds_for
from referee.verdict.statistics import NoiseFloor, controls_error, mean, spread_interval
from study.analysis.verdict import LEVEL, VERDICT_SEEDS, Verdict
from study.runs import Run

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


PERCENT = (0.5, 1.0, 2.0, 5.0)  # of perplexity: the effects whose seeds are counted


@dataclass(frozen=True)
class SeedsNeeded:
    """Seeds that detect a change of `percent` of perplexity; None: more than 1,000."""

    percent: float
    low: int | None
    high: int | None


@dataclass(frozen=True)
class Sensitivity:
    """The effects (nats) that `at_seeds` seeds detect in 80 % of studies: from mde_low to mde_high.

    variant: source of the spread; None: the noise floor. seeds: number of finished seeds. spread: standard deviation
    (nats) of one seed's difference, measured with `dof` degrees of freedom. level: of the test. needed: seeds to plan
    in a new study. raised: seeds in all, if this study adds a look, to detect 1 %; None where none was planned.
    """

    variant: str | None
    seeds: int
    at_seeds: int
    spread: float
    dof: int
    level: float
    mde_low: float
    mde_high: float
    seed_hours: float | None  # recorded run time of all variants at one seed
    needed: list[SeedsNeeded]
    raised: SeedsNeeded | None


def sensitivities(
    verdicts: Sequence[Verdict],
    floor: NoiseFloor | None,
    seeds: int,
    planned: Mapping[str, int],
    controls: int,
    hours: float | None,
) -> list[Sensitivity]:
    """Return the sensitivity of each variant that has enough seeds for a verdict.

    Without such a variant, return one estimate from the noise floor. seeds: number of finished seeds. planned:
    variant -> number of finished and pending seeds. controls: number of control arms at a seed.
    """
    found = [
        _sensitivity(one.variant, one.seeds, max(planned.get(one.variant, 0), one.planned), one.test.spread,
                     one.seeds - 1, one.reads, hours)
        for one in verdicts
        if one.seeds >= VERDICT_SEEDS and one.test.spread
    ]  # fmt: skip
    if found or floor is None or floor.sigma <= 0 or controls < 1:
        return found
    spread = controls_error(floor.sigma, [controls])
    return [_sensitivity(None, seeds, max(planned.values(), default=0), spread, floor.dof, (), hours)]


def _sensitivity(
    variant: str | None,
    seeds: int,
    planned: int,
    spread: float,
    dof: int,
    looks: tuple[int, ...],
    hours: float | None,
) -> Sensitivity:
    low, high = spread_interval(spread, dof)
    at = max(seeds, planned, VERDICT_SEEDS)
    level = nominal_levels(looks)[-1] if looks else LEVEL

    def needed(percent: float, first: int, level: Callable[[int], float]) -> SeedsNeeded:
        effect = math.log1p(percent / 100)
        return SeedsNeeded(percent, *(seeds_for(bound, effect, first, level) for bound in (low, high)))

    return Sensitivity(
        variant=variant,
        seeds=seeds,
        at_seeds=at,
        spread=spread,
        dof=dof,
        level=level,
        mde_low=mde(low, at, level),
        mde_high=mde(high, at, level),
        seed_hours=hours,
        needed=[needed(one, VERDICT_SEEDS, lambda count: nominal_levels((count,))[0]) for one in PERCENT],
        raised=needed(1.0, looks[-1] + 1, lambda count: nominal_levels((*looks, count))[-1])
        if looks
        else None,
    )


def seed_hours(used: Sequence[Run], at_once: int = 1) -> float | None:
    """Return the hours that one seed of every variant takes, evaluation included; None where no clock is known.

    at_once: runs at a time; a seed takes at least its longest run.
    """
    by_variant: dict[str, list[float]] = {}
    for run in used:
        clock = run.record.clock
        if clock:
            by_variant.setdefault(run.variant, []).append(clock.total)
    seconds = list(map(mean, by_variant.values()))
    return max(max(seconds), math.fsum(seconds) / at_once) / 3600 if seconds else None
