"""Small-sample statistics of paired runs. Standard library only.

All of it works on validation losses in nats: a difference of losses is the logarithm of a ratio of perplexities.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with its two-sided confidence interval; low and high are None where there is too little data."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def contains_zero(self) -> bool | None:
        """Whether zero is inside; None where there is no interval."""
        return None if self.low is None or self.high is None else self.low <= 0.0 <= self.high

    def reaching(self, move: float) -> Interval:
        """With the bound towards which all of it would be moved by `move` that far out; the estimate stays."""
        if self.low is None or self.high is None:
            return self
        return Interval(self.mean, self.low + min(move, 0.0), self.high + max(move, 0.0), self.count)


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by Lentz's continued fraction (A&S 26.5.8)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    front = (
        math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b))
        / a
    )
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(1.0 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 500):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / ((1.0 + step * d) or tiny)
            c = (1.0 + step / c) or tiny
            value *= c * d
        if abs(c * d - 1.0) < 1e-16:
            break
    return front * value


def t_tail(t: float, freedom: float) -> float:
    """P(|T| >= |t|) of Student's t with `freedom` degrees of freedom: a two-sided p-value."""
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


@functools.cache
def t_quantile(confidence: float, freedom: float) -> float:
    """The t with P(|T| < t) = confidence, by bisection on `t_tail`."""
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > 1.0 - confidence:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_tail(middle, freedom) > 1.0 - confidence else (low, middle)
    return (low + high) / 2


def perplexity_percent(difference: float) -> float:
    """A difference of losses in nats as the change of perplexity that it is, in percent; finite for any difference."""
    return 100 * math.expm1(min(difference, 300.0))


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def sum_of_squares(values: Sequence[float]) -> float:
    """Of the deviations from the mean."""
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values)


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean of independent values with its t interval; of paired differences too. One value has no interval."""
    centre, count = mean(values), len(values)
    if count < 2:
        return Interval(centre, None, None, count)
    error = math.sqrt(sum_of_squares(values) / (count - 1) / count)
    half = t_quantile(CONFIDENCE, count - 1) * error
    return Interval(centre, centre - half, centre + half, count)


@dataclass(frozen=True)
class NoiseFloor:
    """Standard deviation of a run's loss among equivalent arms of one seed, in nats, and its degrees of freedom."""

    sigma: float
    freedom: int


def noise_floor(arms_by_seed: Sequence[Sequence[float]]) -> NoiseFloor | None:
    """Pooled within seeds over the equivalent arms: S (k-1) degrees of freedom for S seeds of k arms.

    Seeds may have different numbers of arms; None where no seed has two.
    """
    freedom = sum(len(arms) - 1 for arms in arms_by_seed if arms)
    if freedom < 1:
        return None
    squares = math.fsum(sum_of_squares(arms) for arms in arms_by_seed if len(arms) > 1)
    return NoiseFloor(math.sqrt(squares / freedom), freedom)


@dataclass(frozen=True)
class VarianceRatio:
    """Two pooled variances, their ratio and the two-sided p-value of the F test that they are one."""

    ratio: float
    freedom: tuple[int, int]
    p_value: float


@dataclass(frozen=True)
class AgainstFloor:
    """A variant against the mean of the equivalent arms at the same seeds, judged by their noise floor.

    own: the same mean with the t interval of the differences themselves, which takes nothing from the arms' noise.
    variance: of the variant's runs, over that of the arms' if they vary alike; None where one seed has no variance.
    """

    difference: Interval
    p_value: float
    own: Interval
    variance: VarianceRatio | None

    @property
    def spread(self) -> float | None:
        """Standard deviation (nats) of the differences over seeds; None of one seed."""
        if self.own.high is None:
            return None
        count = self.own.count
        return (self.own.high - self.own.mean) * math.sqrt(count) / t_quantile(CONFIDENCE, count - 1)

    @property
    def varies_more(self) -> bool:
        """Whether the variant's runs were seen to vary more than the arms', which `difference` does not allow for."""
        seen = self.variance
        return seen is not None and seen.ratio > 1 and seen.p_value < 1 - CONFIDENCE


def against_arms_error(sigma: float, arms: Sequence[int]) -> float:
    """Standard error of the mean over seeds of (a run) - (mean of the k arms at its seed), with each seed's k.

    A difference has variance sigma^2 (1 + 1/k) where the run varies as the arms do and is none of them.
    """
    return sigma * math.sqrt(math.fsum(1 + 1 / k for k in arms)) / len(arms)


def against_floor(
    pairs: Sequence[tuple[float, Sequence[float]]],
    floor: NoiseFloor | None = None,
    move: float = 0.0,
) -> AgainstFloor | None:
    """pairs: (the variant's loss, the losses of the equivalent arms) of each seed. None without a noise floor.

    floor: that of the whole study, which may have seeds the variant lacks; by default that of the pairs' arms.
    move: what the difference may change by, which is taken off before it is tested, where it takes it towards zero.

    The difference of seed s has variance sigma^2 (1 + 1/k_s) if the variant has no effect and its runs vary as the
    arms do; the mean over seeds is compared with t of the floor's degrees of freedom.
    """
    used = [(value, arms) for value, arms in pairs if arms]
    floor = floor or noise_floor([arms for _, arms in used])
    if floor is None or not used:
        return None
    differences = [value - mean(arms) for value, arms in used]
    centre, count = mean(differences), len(used)
    error = against_arms_error(floor.sigma, [len(arms) for _, arms in used])
    half = t_quantile(CONFIDENCE, floor.freedom) * error
    left = what_is_left(centre, move)
    p_value = t_tail(left / error, floor.freedom) if error > 0 else float(left == 0)
    variance = None
    if count > 1:
        seen = NoiseFloor(math.sqrt(sum_of_squares(differences) / (count - 1)), count - 1)
        variance = variance_ratio(seen, NoiseFloor(error * math.sqrt(count), floor.freedom))
    interval = Interval(centre, centre - half, centre + half, count)
    return AgainstFloor(interval, p_value, mean_interval(differences), variance)


def what_is_left(difference: float, move: float) -> float:
    """The difference without as much of `move` as takes it towards zero, and not beyond."""
    return max(difference + min(move, 0.0), 0.0) if difference > 0 else min(difference + max(move, 0.0), 0.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (Holm 1979), in the given order."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def pooled_proportion(rates: Sequence[float], items: int) -> tuple[float, float]:
    """Mean of several runs' accuracies on the same items, and the standard error of one run on these items.

    The runs answer the same questions, so more runs do not make the sample of questions larger.
    """
    rate = mean(rates)
    return rate, math.sqrt(rate * (1 - rate) / (items - 1)) if items > 1 else math.nan


@dataclass(frozen=True)
class SignTest:
    """How many pairs one side won, how many the other, and the exact two-sided p-value that it was even."""

    wins: int
    losses: int
    p_value: float


def sign_test(differences: Sequence[float]) -> SignTest:
    """The exact binomial test that positive and negative differences are equally likely; zeros say nothing.

    On the differences 1, 0, -1 of two runs' correct answers item by item it is McNemar's exact test.
    """
    wins = sum(value > 0 for value in differences)
    losses = sum(value < 0 for value in differences)
    fewer, pairs = min(wins, losses), wins + losses
    # P(X <= k) of n fair coins is I_1/2(n-k, k+1)
    tail = incomplete_beta(pairs - fewer, fewer + 1, 0.5) if pairs else 0.5
    return SignTest(wins, losses, min(1.0, 2 * tail))


def variance_ratio(one: NoiseFloor, other: NoiseFloor) -> VarianceRatio | None:
    """The F test of two independent noise floors; None where the second has no spread to compare with.

    As every F test of variances it takes the values to be normal.
    """
    if other.sigma <= 0 or one.sigma <= 0:
        return None
    ratio = (one.sigma / other.sigma) ** 2
    a, b = one.freedom, other.freedom
    below = f_cdf(ratio, a, b)
    return VarianceRatio(ratio, (a, b), min(1.0, 2 * min(below, 1 - below)))


def f_cdf(ratio: float, a: float, b: float) -> float:
    """P(F <= ratio) of the F distribution with a and b degrees of freedom."""
    return incomplete_beta(a / 2, b / 2, a * ratio / (a * ratio + b))


def unseen_ratios(a: float, b: float) -> tuple[float, float]:
    """The ratios of variances between which the two-sided F test sees no difference, by bisection on `f_cdf`."""

    def quantile(probability: float) -> float:
        low, high = -50.0, 50.0  # of the logarithm
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if f_cdf(math.exp(middle), a, b) < probability else (low, middle)
        return math.exp(low)

    tail = (1 - CONFIDENCE) / 2
    return quantile(tail), quantile(1 - tail)
