"""Power of the paired t test: the smallest effect that a number of seeds detects, and the seeds that an effect needs.

A two-sided t test with `dof` degrees of freedom of a true effect e with standard error s has power
P(|T'| > t_crit), where T' follows the noncentral t distribution with noncentrality e / s.

All effects are differences of losses in nats: the logarithm of a ratio of perplexities.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from scipy import special

from study.stats.statistics import CONFIDENCE, t_quantile

POWER = 0.8
MOST_SEEDS = 1000


def power(noncentrality: float, dof: float) -> float:
    """Return the power of a two-sided 5 % t test for an effect of `noncentrality` standard errors; 1 beyond 37."""
    effect = abs(noncentrality)
    if effect > 37.0:
        return 1.0
    critical = t_quantile(CONFIDENCE, dof)
    above = 1.0 - float(special.nctdtr(dof, effect, critical))
    below = float(special.nctdtr(dof, effect, -critical))
    return above + (0.0 if math.isnan(below) else below)  # scipy gives nan where it is below 1e-15


@functools.cache
def detectable(dof: float) -> float:
    """Return the smallest true effect, in standard errors, that the test detects in 80 % of studies."""
    low, high = 0.0, 37.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, dof) < POWER else (low, middle)
    return (low + high) / 2


def mde(spread: float, seeds: int) -> float:
    """Return the minimum detectable effect (nats) of a paired t test over two or more seeds.

    spread: the true standard deviation (nats) of one seed's difference.
    """
    return detectable(seeds - 1) * spread / math.sqrt(seeds)


def seeds_for(spread: float, effect: float, fewest_seeds: int = 2) -> int | None:
    """Return the fewest seeds (at least `fewest_seeds`) that detect an effect (nats); None beyond MOST_SEEDS."""
    return fewest(lambda seeds: seeds >= fewest_seeds and mde(spread, seeds) <= abs(effect), MOST_SEEDS)


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
