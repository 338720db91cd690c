"""The effects that a study can detect, as ranges: the true spread over seeds is known only roughly. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from study.analysis.verdict import VERDICT_SEEDS, Verdict
from study.records.runs import Run
from study.stats.power import mde, seeds_for
from study.stats.statistics import NoiseFloor, controls_error, mean, spread_interval

PERCENT = (0.5, 1.0, 2.0, 5.0)  # of perplexity: the effects whose seeds are counted


@dataclass(frozen=True)
class SeedsNeeded:
    """Seeds in all that detect a change of `percent` of perplexity; None: more than 1,000."""

    percent: float
    low: int | None
    high: int | None


@dataclass(frozen=True)
class Sensitivity:
    """The effects (nats) that `at_seeds` seeds detect in 80 % of studies: from mde_low to mde_high.

    variant: source of the spread; None: the noise floor. seeds: number of finished seeds. spread: standard deviation
    (nats) of one seed's difference, measured with `dof` degrees of freedom.
    """

    variant: str | None
    seeds: int
    at_seeds: int
    spread: float
    dof: int
    mde_low: float
    mde_high: float
    seed_hours: float | None  # recorded run time of all variants at one seed
    needed: list[SeedsNeeded]


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

    def of_spread(variant: str | None, seeds: int, planned: int, spread: float, dof: int) -> Sensitivity:
        low, high = spread_interval(spread, dof)
        needed = []
        for percent in PERCENT:
            effect = math.log1p(percent / 100)
            counts = (seeds_for(bound, effect, VERDICT_SEEDS) for bound in (low, high))
            needed.append(SeedsNeeded(percent, *counts))
        at = max(seeds, planned, VERDICT_SEEDS)
        return Sensitivity(variant, seeds, at, spread, dof, mde(low, at), mde(high, at), hours, needed)

    found = [
        of_spread(one.variant, one.seeds, planned.get(one.variant, 0), one.test.spread, one.seeds - 1)
        for one in verdicts
        if one.seeds >= VERDICT_SEEDS and one.test.spread
    ]
    if found or floor is None or floor.sigma <= 0 or controls < 1:
        return found
    spread = controls_error(floor.sigma, [controls])
    return [of_spread(None, seeds, max(planned.values(), default=0), spread, floor.dof)]


def seed_hours(used: Sequence[Run]) -> float | None:
    """Return the hours that one seed of every variant takes, evaluation included; None where no clock is known."""
    by_variant: dict[str, list[float]] = {}
    for run in used:
        clock = run.record.clock
        if clock:
            by_variant.setdefault(run.variant, []).append(clock.total)
    return math.fsum(mean(seconds) for seconds in by_variant.values()) / 3600 if by_variant else None
