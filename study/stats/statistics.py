"""Small-sample statistics of paired runs. Distributions are those of scipy.special.

All of it works on validation losses in nats: a difference of losses is the logarithm of a ratio of perplexities.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

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


def t_p_value(t: float, dof: float) -> float:
    """Return the two-sided p-value P(|T| >= |t|) of Student's t with `dof` degrees of freedom."""
    return float(2 * special.stdtr(dof, -abs(t)))


@functools.cache
def t_quantile(confidence: float, dof: float) -> float:
    """Return the t with P(|T| < t) = confidence."""
    return float(special.stdtrit(dof, (1 + confidence) / 2))


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
    dof: int


def noise_floor(arms_by_seed: Sequence[Sequence[float]]) -> NoiseFloor | None:
    """Pooled within seeds over the equivalent arms: S (k-1) degrees of freedom for S seeds of k arms.

    Seeds may have different numbers of arms; None where no seed has two.
    """
    dof = sum(len(arms) - 1 for arms in arms_by_seed if arms)
    if dof < 1:
        return None
    squares = math.fsum(sum_of_squares(arms) for arms in arms_by_seed if len(arms) > 1)
    return NoiseFloor(math.sqrt(squares / dof), dof)


@dataclass(frozen=True)
class VarianceRatio:
    """Two pooled variances, their ratio and the two-sided p-value of the F test that they are one."""

    ratio: float
    dof: tuple[int, int]
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
    half = t_quantile(CONFIDENCE, floor.dof) * error
    left = what_is_left(centre, move)
    p_value = t_p_value(left / error, floor.dof) if error > 0 else float(left == 0)
    variance = None
    if count > 1:
        seen = NoiseFloor(math.sqrt(sum_of_squares(differences) / (count - 1)), count - 1)
        variance = variance_ratio(seen, NoiseFloor(error * math.sqrt(count), floor.dof))
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
    p_value = min(1.0, 2 * float(special.bdtr(min(wins, losses), wins + losses, 0.5)))
    return SignTest(wins, losses, p_value)


def variance_ratio(one: NoiseFloor, other: NoiseFloor) -> VarianceRatio | None:
    """The F test of two independent noise floors; None where the second has no spread to compare with.

    As every F test of variances it takes the values to be normal.
    """
    if other.sigma <= 0 or one.sigma <= 0:
        return None
    ratio = (one.sigma / other.sigma) ** 2
    a, b = one.dof, other.dof
    p_value = 2 * float(min(special.fdtr(a, b, ratio), special.fdtrc(a, b, ratio)))
    return VarianceRatio(ratio, (a, b), min(1.0, p_value))


def undetected_ratios(a: float, b: float) -> tuple[float, float]:
    """Return the ratios of variances between which the two-sided F test finds no difference."""
    tail = (1 - CONFIDENCE) / 2
    return float(special.fdtri(a, b, tail)), float(special.fdtri(a, b, 1 - tail))
