"""How small an effect the seeds at hand can show, and how many seeds an effect needs.

A two-sided t test with `dof` degrees of freedom of a true effect e with standard error s has power
P(|T'| > t_crit), where T' follows the noncentral t distribution with noncentrality e / s.

All effects are differences of losses in nats: the logarithm of a ratio of perplexities.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scipy import special

from study.stats.statistics import CONFIDENCE, against_arms_error, t_quantile

POWER = 0.8
MOST_SEEDS = 1000


def power(noncentrality: float, dof: float) -> float:
    """Of a two-sided t test at 5 %, for a true effect of `noncentrality` standard errors; 1 beyond 37 of them."""
    if abs(noncentrality) > 37.0:
        return 1.0
    critical = t_quantile(CONFIDENCE, dof)
    above = 1.0 - float(special.nctdtr(dof, abs(noncentrality), critical))
    below = float(special.nctdtr(dof, abs(noncentrality), -critical))
    return above + (0.0 if math.isnan(below) else below)  # scipy gives nan below 1e-15


@functools.cache
def detectable(dof: float) -> float:
    """The smallest true effect, in standard errors, that such a test shows in 80 % of studies."""
    low, high = 0.0, 37.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, dof) < POWER else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Design:
    """One comparison, made at every seed.

    spread: standard deviation in nats of one seed's difference; dof_per_seed and dof_lost: S seeds leave
    S * dof_per_seed - dof_lost degrees of freedom to estimate it with.
    """

    spread: float
    dof_per_seed: int
    dof_lost: int

    def dof(self, seeds: int) -> int:
        return seeds * self.dof_per_seed - self.dof_lost

    def detectable(self, seeds: int) -> float | None:
        """The smallest true effect in nats seen with 80 % power; None where so few seeds leave no test."""
        if seeds < 1 or self.dof(seeds) < 1:
            return None
        return detectable(self.dof(seeds)) * self.spread / math.sqrt(seeds)


def all_detect(designs: Sequence[Design], seeds: int) -> float | None:
    """The smallest true effect in nats that each of the tests shows; None where one of them is none."""
    seen = [design.detectable(seeds) for design in designs]
    return None if None in seen else max(effect for effect in seen if effect is not None)


def seeds_for(designs: Sequence[Design], effect: float) -> int | None:
    """The fewest seeds at which each of the tests shows an effect (nats); None where MOST_SEEDS are too few."""
    return fewest(
        lambda seeds: (seen := all_detect(designs, seeds)) is not None and seen <= abs(effect), MOST_SEEDS
    )


def against_arms(sigma: float, arms: Sequence[int], dof: int) -> Design | None:
    """A real change against the mean of the k equivalent arms of each seed: variance sigma^2 (1 + 1/k) a seed.

    arms: k of each seed at hand, all of whom leave `dof` degrees; further seeds are like them, with the most arms.
    """
    each, seeds = max(arms, default=0) - 1, len(arms)
    if each < 1:
        return None
    return Design(against_arms_error(sigma, arms) * math.sqrt(seeds), each, seeds * each - dof)


def fewest(enough: Callable[[int], bool], most: int) -> int | None:
    """The smallest count in 1 .. most that is enough, of a property that stays true once it is; None without one."""
    low, high = 0, 1
    while not enough(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
