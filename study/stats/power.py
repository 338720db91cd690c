"""How small an effect the seeds at hand can show, and how many seeds an effect needs. Standard library only.

A two-sided t test with `freedom` degrees of freedom of a true effect e with standard error s has power
P(|T'| > t_crit), where T' follows the noncentral t distribution with noncentrality e / s. Its distribution function
is the series of Guenther (1978) as in Lenth (1989), Algorithm AS 243, Applied Statistics 38(1).

All effects are differences of losses in nats: the logarithm of a ratio of perplexities.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from study.stats.statistics import CONFIDENCE, against_arms_error, incomplete_beta, t_quantile

POWER = 0.8
MOST_SEEDS = 1000


def normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


def noncentral_t_cdf(t: float, freedom: float, noncentrality: float) -> float:
    """P(T' <= t). Absolute error below 1e-10 for |noncentrality| up to 37, beyond which AS 243 underflows.

    ValueError beyond that.
    """
    if abs(noncentrality) > 37.0:
        raise ValueError(f"noncentrality {noncentrality}; right: -37 .. 37")
    if t < 0.0:
        return 1.0 - noncentral_t_cdf(-t, freedom, -noncentrality)
    x, half, b = t * t / (freedom + t * t), noncentrality**2 / 2, freedom / 2
    if x <= 0.0:
        return normal_cdf(-noncentrality)
    p = 0.5 * math.exp(-half)
    q = math.sqrt(2 / math.pi) * p * noncentrality
    odd, even = incomplete_beta(0.5, b, x), incomplete_beta(1.0, b, x)
    # I_x(a+1, b) = I_x(a, b) - step(a), step(a) = Gamma(a+b) / (Gamma(a+1) Gamma(b)) x^a (1-x)^b
    step_odd, step_even = _beta_step(0.5, b, x), _beta_step(1.0, b, x)
    total, left = p * odd + q * even, 0.5 - p
    for j in range(1, 5000):
        odd, even = odd - step_odd, even - step_even
        step_odd *= x * (b + j - 0.5) / (j + 0.5)
        step_even *= x * (b + j) / (j + 1)
        p *= half / j
        q *= half / (j + 0.5)
        total += p * odd + q * even
        left -= p
        if j > half and 2 * left * odd < 1e-13:
            break
    return min(1.0, max(0.0, total + normal_cdf(-noncentrality)))


def _beta_step(a: float, b: float, x: float) -> float:
    if x >= 1.0:
        return 0.0
    return math.exp(
        math.lgamma(a + b) - math.lgamma(a + 1) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )


def power(noncentrality: float, freedom: float) -> float:
    """Of a two-sided t test at 5 %, for a true effect of `noncentrality` standard errors; 1 beyond 37 of them."""
    if abs(noncentrality) > 37.0:
        return 1.0
    critical = t_quantile(CONFIDENCE, freedom)
    return (
        1.0
        - noncentral_t_cdf(critical, freedom, noncentrality)
        + noncentral_t_cdf(-critical, freedom, noncentrality)
    )


@functools.cache
def detectable(freedom: float) -> float:
    """The smallest true effect, in standard errors, that such a test shows in 80 % of studies."""
    low, high = 0.0, 37.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, freedom) < POWER else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Design:
    """One comparison, made at every seed.

    spread: standard deviation in nats of one seed's difference; freedom_per_seed and freedom_lost: S seeds leave
    S * freedom_per_seed - freedom_lost degrees of freedom to estimate it with.
    """

    spread: float
    freedom_per_seed: int
    freedom_lost: int

    def freedom(self, seeds: int) -> int:
        return seeds * self.freedom_per_seed - self.freedom_lost

    def detectable(self, seeds: int) -> float | None:
        """The smallest true effect in nats seen with 80 % power; None where so few seeds leave no test."""
        if seeds < 1 or self.freedom(seeds) < 1:
            return None
        return detectable(self.freedom(seeds)) * self.spread / math.sqrt(seeds)


def all_detect(designs: Sequence[Design], seeds: int) -> float | None:
    """The smallest true effect in nats that each of the tests shows; None where one of them is none."""
    seen = [design.detectable(seeds) for design in designs]
    return None if None in seen else max(effect for effect in seen if effect is not None)


def seeds_for(designs: Sequence[Design], effect: float) -> int | None:
    """The fewest seeds at which each of the tests shows an effect (nats); None where MOST_SEEDS are too few."""
    return fewest(
        lambda seeds: (seen := all_detect(designs, seeds)) is not None and seen <= abs(effect), MOST_SEEDS
    )


def against_arms(sigma: float, arms: Sequence[int], freedom: int) -> Design | None:
    """A real change against the mean of the k equivalent arms of each seed: variance sigma^2 (1 + 1/k) a seed.

    arms: k of each seed at hand, all of whom leave `freedom` degrees; further seeds are like them, with the most arms.
    """
    each, seeds = max(arms, default=0) - 1, len(arms)
    if each < 1:
        return None
    return Design(against_arms_error(sigma, arms) * math.sqrt(seeds), each, seeds * each - freedom)


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
