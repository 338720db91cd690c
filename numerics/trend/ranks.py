"""Compare the gradients of the ranks before reduction with each other and with the reduced ones (section 4.6).

Ranks of data parallelism see other data of one distribution, so each of R ranks has the largest gradient norm in a step
with probability 1/R. A rank deviates where it has the largest (or the smallest) norm in so many steps that the binomial
tail is below ALARM / 2R.

The mean of a reduced gradient is the mean over ranks of the means before reduction, or their sum. Rounding to bfloat16
moves it by about 2^-8 of its size in the median over steps; a tensor over 16 times that does not match. Where elements
cancel, as in gradients before a layer norm, the size is that of a mean of independent elements: RMS / sqrt(n).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from numerics.trend.anomalies import aligned, not_finite
from numerics.trend.history import ALARM
from numerics.trend.tables import Monitored, TrendTable, computation_order

MISMATCH = 16 * 2.0**-8  # relative difference of the means, in the median over steps
FEWEST = 16  # steps that a median is taken over


@dataclass(frozen=True)
class FirstNotFinite:
    """The first step at which a gradient before reduction is not finite, its ranks, and the tensor that is first."""

    step: int
    ranks: list[int]
    name: str


@dataclass(frozen=True)
class DeviatingRank:
    """A rank with the largest or the smallest norm in `count` of `steps` steps. ratio: to the median rank."""

    rank: int
    largest: bool
    count: int
    steps: int
    ratio: float
    probability: float


@dataclass
class Ranks:
    """count: ranks with unreduced gradients. mismatched: tensor -> relative difference of the means.

    checked: tensors whose reduction was checked. operation: mean or sum.
    """

    count: int = 0
    not_finite: FirstNotFinite | None = None
    deviating: list[DeviatingRank] = field(default_factory=list)
    checked: int = 0
    operation: str = ""
    mismatched: dict[str, float] = field(default_factory=dict)


def compare_ranks(run: Monitored) -> Ranks:
    """Compare the ranks of one run. A run of one rank has nothing to compare."""
    tables = run.of_kind("grad_unreduced")
    result = Ranks(len(tables))
    if not tables:
        return result
    result.not_finite = _first_not_finite(run, tables)
    if len(tables) > 1:
        result.deviating = _deviating(tables)
        _check_reduction(result, tables, run.of_kind("grad_reduced"))
    return result


def binomial_tail(count: int, total: int, probability: float) -> float:
    """Return P(X >= count) of a binomial distribution."""
    logs = (math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
            + k * math.log(probability) + (total - k) * math.log1p(-probability)
            for k in range(count, total + 1))  # fmt: skip
    return min(1.0, math.fsum(map(math.exp, logs)))


def _first_not_finite(run: Monitored, tables: dict[int, TrendTable]) -> FirstNotFinite | None:
    """The tensor is the first one in the order of backward."""
    found: dict[int, tuple[int, str]] = {}
    for rank, table in tables.items():
        bad = not_finite(table)
        columns = np.flatnonzero(bad.any(axis=0))
        if len(columns):
            row = min(np.flatnonzero(bad[:, columns[0]]), key=computation_order(run, table).__getitem__)
            found[rank] = (int(table.steps[columns[0]]), table.names[row])
    if not found:
        return None
    step = min(one for one, _ in found.values())
    ranks = sorted(rank for rank, (one, _) in found.items() if one == step)
    return FirstNotFinite(step, ranks, found[ranks[0]][1])


def _deviating(tables: dict[int, TrendTable]) -> list[DeviatingRank]:
    ranks, first = list(tables), next(iter(tables.values()))
    squares = []
    for table in tables.values():
        norms = aligned(table, table.values["norm"], first) if "norm" in table.values else None
        if norms is None:
            return []
        squares.append(np.square(norms.astype(np.float64)))
    common = np.isfinite(np.array(squares)).all(axis=0)
    totals = np.array([np.where(common, square, 0.0).sum(axis=0) for square in squares])
    totals = np.sqrt(totals[:, common.any(axis=0)])
    if totals.shape[1] == 0:
        return []
    found: list[DeviatingRank] = []
    left = list(range(len(ranks)))
    while len(left) > 1:  # without a deviating rank, the others are compared among themselves
        one = _most_extreme(totals[left], [ranks[place] for place in left])
        if one.probability >= ALARM / (2 * len(left)):
            break
        found.append(one)
        left.remove(ranks.index(one.rank))
    return found


def _most_extreme(totals: NDArray[np.float64], ranks: Sequence[int]) -> DeviatingRank:
    """Return the rank whose count of largest or smallest norms has the lowest probability. totals: (ranks, steps)."""
    found = []
    unequal = totals.max(axis=0) > totals.min(axis=0)
    for largest in (True, False):
        winners = totals.argmax(axis=0) if largest else totals.argmin(axis=0)
        for place, rank in enumerate(ranks):
            count = int(((winners == place) & unequal).sum())
            others = np.median(np.delete(totals, place, axis=0), axis=0)
            ratio = float(np.median(totals[place] / np.maximum(others, 1e-300)))
            probability = binomial_tail(count, totals.shape[1], 1 / len(ranks))
            found.append(DeviatingRank(rank, largest, count, totals.shape[1], ratio, probability))
    return min(found, key=lambda one: one.probability)


def _check_reduction(result: Ranks, tables: dict[int, TrendTable], reduced: dict[int, TrendTable]) -> None:
    table = next((one for one in reduced.values() if "mean" in one.values), None)
    if table is None or any("mean" not in one.values for one in tables.values()):
        return
    parts = np.array([aligned(one, one.values["mean"], table).astype(np.float64) for one in tables.values()])
    total, whole = parts.sum(axis=0), np.where(table.present, table.values["mean"], np.nan).astype(np.float64)
    usable = np.isfinite(total) & np.isfinite(whole) & (total != 0)
    rows = np.flatnonzero(usable.sum(axis=1) >= FEWEST)
    if not len(rows):
        return
    least = _size_of_means(table)
    sizes = [
        float(np.median(np.abs(whole[row, usable[row]] / total[row, usable[row]])))
        for row in rows
        if np.median(np.abs(total[row, usable[row]])) >= np.median(least[row, usable[row]])
    ]
    typical = max(float(np.median(sizes)) if sizes else 1.0, 1e-300)
    summed = abs(math.log(typical)) < abs(math.log(typical * len(tables)))
    result.operation = "sum" if summed else "mean"
    expected = total if summed else total / len(tables)
    result.checked = len(rows)
    for row in rows:
        one, other = whole[row, usable[row]], expected[row, usable[row]]
        scale = np.maximum(np.abs(other), least[row, usable[row]])
        difference = float(np.median(np.abs(one - other) / np.maximum(scale, 1e-300)))
        if difference > MISMATCH:
            result.mismatched[table.names[row]] = difference


def _size_of_means(table: TrendTable) -> NDArray[np.float64]:
    """Return RMS / sqrt(n) of each tensor and step, which is RMS^2 / norm; 0 where the table has no std."""
    if "std" not in table.values or "norm" not in table.values:
        return np.zeros(table.values["mean"].shape)
    squares = sum(np.square(table.values[name].astype(np.float64)) for name in ("mean", "std"))
    size = np.asarray(squares) / np.maximum(table.values["norm"].astype(np.float64), 1e-300)
    return np.where(np.isfinite(size), size, 0.0)
