"""Power of the paired t test: the smallest effect that a number of seeds detects, and the seeds that an effect needs.

A two-sided t test with `dof` degrees of freedom of a true effect e with standard error s has power
P(|T'| > t_crit), where T' follows the noncentral t distribution with noncentrality e / s.

All effects are differences of losses in nats: the logarithm of a ratio of perplexities.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import special

from referee.verdict.statistics import CONFIDENCE, t_quantile

POWER = 0.8
LEVEL = 1 - CONFIDENCE
MOST_SEEDS = 1000
CHANCES = (np.arange(4000) + 0.5) / 4000  # probabilities at which the spread's distribution is evaluated


def power(noncentrality: float, dof: float, level: float = LEVEL) -> float:
    """Return the power of a two-sided t test for an effect of `noncentrality` standard errors."""
    effect = abs(noncentrality)
    if effect > 37.0:  # scipy has no accurate value
        far, near = _limits(effect, dof, level)
        return float(np.mean(special.ndtr(-far) + special.ndtr(-near)))
    critical = t_quantile(1 - level, dof)
    above = 1.0 - float(special.nctdtr(dof, effect, critical))
    below = float(special.nctdtr(dof, effect, -critical))
    return above + (0.0 if math.isnan(below) else below)  # scipy gives nan where it is below 1e-15


def exaggeration(noncentrality: float, dof: int, level: float = LEVEL) -> float:
    """Return the mean size of an estimate that a two-sided t test calls different, over the size of the effect.

    It is the type M error of Gelman and Carlin 2014. noncentrality: the effect in standard errors, not 0.
    """
    effect = abs(noncentrality)
    above, below = _limits(effect, dof, level)
    called = special.ndtr(-above) + special.ndtr(-below)
    densities = (np.exp(-(above**2) / 2) + np.exp(-(below**2) / 2)) / math.sqrt(2 * math.pi)
    sizes = densities + effect * (special.ndtr(-above) - special.ndtr(-below))
    return float(sizes.sum() / called.sum() / effect)


def _limits(effect: float, dof: float, level: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the limits of the test above and below, from the effect, in standard errors: one for each of CHANCES."""
    limit = _limit(dof, level)
    return limit - effect, limit + effect


@functools.lru_cache(maxsize=8)
def _limit(dof: float, level: float) -> NDArray[np.float64]:
    """Return the limit of |T| in standard errors, for each of CHANCES of the spread."""
    limit: NDArray[np.float64] = t_quantile(1 - level, dof) * np.sqrt(special.chdtri(dof, CHANCES) / dof)
    return limit


@functools.cache
def detectable(dof: float, level: float = LEVEL) -> float:
    """Return the smallest true effect, in standard errors, that the test detects in 80 % of studies."""
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, dof, level) < POWER else (low, middle)
    return (low + high) / 2


def mde(spread: float, seeds: int, level: float = LEVEL) -> float:
    """Return the minimum detectable effect (nats) of a paired t test over two or more seeds.

    spread: the true standard deviation (nats) of one seed's difference.
    """
    return detectable(seeds - 1, level) * spread / math.sqrt(seeds)


def seeds_for(
    spread: float, effect: float, fewest_seeds: int = 2, level: Callable[[int], float] = lambda seeds: LEVEL
) -> int | None:
    """Return the fewest seeds (at least `fewest_seeds`) that detect an effect (nats); None beyond MOST_SEEDS.

    level: of the test, by the number of seeds.
    """

    def enough(seeds: int) -> bool:
        return seeds >= fewest_seeds and mde(spread, seeds, level(seeds)) <= abs(effect)

    return fewest(enough, MOST_SEEDS)


def fewest(enough: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest count in 1 .. most that is enough; None without one.

    enough: stays true for every larger count.
    """
    low, high = 0, 1
    while not enough(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
