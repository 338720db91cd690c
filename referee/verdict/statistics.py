"""Small-sample statistics of paired runs. Distributions are those of scipy.special.

All of it works on validation losses in nats: a difference of losses is the logarithm of a ratio of perplexities.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
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


def t_tail(t: float, dof: float) -> float:
    """Return the one-sided p-value P(T >= t) of Student's t with `dof` degrees of freedom."""
    return float(special.stdtr(dof, -t))


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
    """The sum of the squared deviations from the mean."""
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the mean of independent values with its t interval. One value has no interval."""
    centre, count = mean(values), len(values)
    if count < 2:
        return Interval(centre, None, None, count)
    half = t_quantile(confidence, count - 1) * standard_deviation(values) / math.sqrt(count)
    return Interval(centre, centre - half, centre + half, count)


def standard_deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation of two or more values."""
    return math.sqrt(sum_of_squares(values) / (len(values) - 1))


@dataclass(frozen=True)
class PairedTest:
    """Paired t test of one difference (nats) a seed, with S-1 degrees of freedom for S seeds.

    difference: the mean with its interval for the two-sided test. narrow: the same mean with its interval for two
    one-sided tests. spread: the standard deviation of the differences. One seed has no interval, spread or p-value.
    """

    difference: Interval
    narrow: Interval
    spread: float | None
    p_value: float | None

    def p_outside(self, margin: float) -> float:
        """Return the larger p-value of the one-sided tests that the mean is -margin or less, or margin or more."""
        count = self.difference.count
        return (
            1.0 if self.spread is None else _p_value(margin - abs(self.difference.mean), self.spread, count)
        )


def paired_t(
    differences: Sequence[float], level: float = 1 - CONFIDENCE, narrow_level: float = 2 * (1 - CONFIDENCE)
) -> PairedTest:
    """Test whether paired differences (one a seed, at least one) have mean zero.

    level, narrow_level: 1 minus the confidence of the two intervals.
    """
    interval, narrow = (mean_interval(differences, 1 - one) for one in (level, narrow_level))
    if interval.count < 2:
        return PairedTest(interval, narrow, None, None)
    spread = standard_deviation(differences)
    return PairedTest(interval, narrow, spread, 2 * _p_value(abs(interval.mean), spread, interval.count))


def _p_value(excess: float, spread: float, count: int) -> float:
    """Return the one-sided p-value of a mean that exceeds its null value by `excess`."""
    error = spread / math.sqrt(count)
    if error > 0:
        return t_tail(excess / error, count - 1)
    return 0.5 * (excess <= 0)


def spread_interval(spread: float, dof: int) -> tuple[float, float]:
    """Return the 95 % chi-square interval of a standard deviation measured with `dof` degrees of freedom."""
    tail = (1 - CONFIDENCE) / 2
    low, high = special.chdtri(dof, tail), special.chdtri(dof, 1 - tail)
    return spread * math.sqrt(dof / low), spread * math.sqrt(dof / high)


@dataclass(frozen=True)
class NoiseFloor:
    """Standard deviation (nats) of a run's loss among the control arms of one seed, and its degrees of freedom."""

    sigma: float
    dof: int


def noise_floor(arms_by_seed: Sequence[Sequence[float]]) -> NoiseFloor | None:
    """Pool the variance of the control arms within each seed: S (k-1) degrees of freedom for S seeds of k arms.

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


def controls_error(sigma: float, controls: Sequence[int]) -> float:
    """Return the standard error of the mean over seeds of (a run minus the mean of the k control arms at its seed).

    sigma: of one run, in nats. controls: k of each seed. The run varies like a control arm and is none of them.
    """
    return sigma * math.sqrt(math.fsum(1 + 1 / k for k in controls)) / len(controls)


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

    The runs answer the same questions, so more runs do not make the sample of questions larger. With one item the
    error is 0.5, the largest possible.
    """
    rate = mean(rates)
    return rate, math.sqrt(rate * (1 - rate) / (items - 1)) if items > 1 else 0.5


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


def perplexity(loss: float) -> str:
    """exp(loss) with as many digits as are readable."""
    value = math.exp(min(loss, 700.0))
    if value >= 1e6:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def percent(difference: float) -> str:
    """A difference of losses as the change of perplexity, with its sign."""
    value = perplexity_percent(difference)
    if abs(value) >= 1000:
        return f"{value:+.1e} %"
    digits = 2 if abs(value) >= 0.1 else 3
    return f"{value if round(value, digits) else 0.0:+.{digits}f} %"


def with_interval(interval: Interval | None, text: Callable[[float], str]) -> str:
    """The estimate and its interval, each end as `text` writes it."""
    return "-" if interval is None else f"{text(interval.mean)}{ends(interval, text)}"


def ends(interval: Interval, text: Callable[[float], str]) -> str:
    """The interval in brackets, or that there is one seed."""
    if interval.low is None or interval.high is None:
        return " (one seed)"
    return f" [{text(interval.low)}, {text(interval.high)}]"
