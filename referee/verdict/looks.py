"""Levels of the t test where its result is read more than once, as seeds are added (alpha spending).

The planned number of seeds spends FIRST_SHARE of the level. Each later look spends half of the rest (Lan and DeMets
1983, Biometrika 70:659).
Without an effect and with normal differences, the t statistics of the looks have one joint distribution, whatever the
variance. It is integrated on a grid of p-values at the last look, with one random path to the earlier looks for each.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from referee.verdict.statistics import CONFIDENCE, t_quantile

FIRST_SHARE = 0.94  # 4.7 % of 5 %
P_VALUES = np.geomspace(1e-10, 1.0, 2**15)  # at the last look
LEVELS = np.append((1 - CONFIDENCE) * 2.0 ** np.arange(-13, 5), 1.0)


@functools.cache
def nominal_levels(looks: tuple[int, ...], level: float = 1 - CONFIDENCE) -> tuple[float, ...]:
    """Return the level of the two-sided t test at each look. Without an effect any look rejects with P = `level`.

    looks: numbers of seeds, ascending, from 2.
    """
    if len(looks) < 2:
        return (FIRST_SHARE * level,) * len(looks)
    earlier = nominal_levels(looks[:-1], level)
    critical = [t_quantile(1 - one, seeds - 1) for one, seeds in zip(earlier, looks, strict=False)]
    unread = np.all(_earlier_statistics(looks) <= np.array(critical)[:, None], axis=0)
    step = math.log(P_VALUES[-1] / P_VALUES[0]) / (len(P_VALUES) - 1)
    spent = np.cumsum(P_VALUES * unread) * step
    share = level * (1 - FIRST_SHARE) / 2 ** len(earlier)
    return (*earlier, float(P_VALUES[min(np.searchsorted(spent, share), len(P_VALUES) - 1)]))


@functools.cache
def _earlier_statistics(looks: tuple[int, ...]) -> NDArray[np.float64]:
    """Return |t| at each look but the last, a column for each of P_VALUES at the last look.

    The residuals of a sample are independent of its t, so a random path with a given last t is a sample of random
    residuals, shifted. Each block of seeds between two looks enters by its sum and its sum of squares.
    """
    draw = np.random.default_rng(looks)
    ends = np.array(looks, dtype=float)[:, None]
    sizes = np.diff(ends, axis=0, prepend=0.0)
    normal = draw.normal(size=(len(looks), len(P_VALUES)))
    sums, squares = (
        np.sqrt(sizes) * normal,
        normal**2 + 2 * draw.standard_gamma((sizes - 1) / 2, normal.shape),
    )
    seeds, mean = ends[-1], sums.sum(axis=0) / ends[-1]
    residual = np.sqrt((squares.sum(axis=0) - seeds * mean**2) / (seeds - 1))
    shift = -special.stdtrit(seeds - 1, P_VALUES / 2) * residual / np.sqrt(seeds) - mean
    squares = np.cumsum(squares + 2 * shift * sums + sizes * shift**2, axis=0)[:-1]
    sums, ends = np.cumsum(sums + sizes * shift, axis=0)[:-1], ends[:-1]
    deviation = np.sqrt(np.maximum(squares - sums**2 / ends, 0) / (ends - 1))
    statistics: NDArray[np.float64] = np.abs(sums) / np.sqrt(ends) / np.maximum(deviation, 1e-300)
    return statistics


def adjusted_for_looks(p_value: float, looks: tuple[int, ...]) -> float:
    """Return the smallest level at which the last look rejects; p_value itself without looks."""
    if len(looks) < 2:
        return min(1.0, p_value / FIRST_SHARE) if looks else p_value
    nominal = np.array([nominal_levels(looks, float(level))[-1] for level in LEVELS])
    if p_value <= nominal[0]:
        return float(p_value * LEVELS[0] / nominal[0])
    return float(np.exp(np.interp(math.log(p_value), np.log(nominal), np.log(LEVELS))))
