"""Find values that leave the history of their own tensor, with a stated rate of false alarms.

The deviation of a value is its distance from the median of the BEFORE values before it, on a log scale where the
statistic is positive. Its unit is the median of the same distances at the last WINDOW values.

Limits come from the tail of all deviations of a table before a step. TAIL of them exceed u, by m on average, in k
different steps. If the tail is exponential, or lighter as that of a normal distribution, a value exceeds u + x m with a
probability of at most

    P(x, k) = TAIL (1 + x/k)^-k        (a mean of k exponential excesses; tensors of one step count as one)

If all deviations are exponential, the i-th smallest of n is a sum of i independent ones with the means 1/n, 1/(n-1)
and so on (Renyi 1953), so a further one exceeds x medians of the history with

    P(x, n) = prod over i = 0 .. (n-1)/2 of (n - i) / (n - i + x)

Each law has a limit, the x with P = ALARM / 2N for N tested values (Bonferroni), and the smaller one counts: a clean
run has any alarm with a probability of at most ALARM. A tensor with a heavier tail of its own has the limit of that.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]

ALARM = 0.01  # probability of any false alarm in a clean run
BEFORE = 16  # values whose median is the expected value
LEAST = 15  # distances that the first unit is computed from
WINDOW = 255  # distances that a unit is computed from
BLOCK = 16  # values with the same unit
ROUNDING = 2.0**-8  # relative; the least unit is the rounding of bfloat16
TINY = 1e-37  # replaces zero on a log scale
TAIL = 0.05  # the part of deviations that is its tail
TAIL_STEPS = 512  # steps that the tail is taken from
LEAST_EXCESSES = 5  # that the tail of a table or of a tensor needs
CHUNK = 2**22  # elements of windows at once


@dataclass(frozen=True)
class History:
    """The history of a table (tensors, steps), with arrays of its shape. NaN where a value has too short a history.

    units: signed deviation in medians. limits: the limit of |units|. expected: the value that the history predicts.
    scale: the unit, as a share of the value on a log scale.
    """

    units: Floats
    limits: Floats
    expected: Floats
    scale: Floats

    @property
    def anomalous(self) -> Flags:
        with np.errstate(invalid="ignore"):
            return np.asarray(np.abs(self.units) > self.limits)


@functools.cache
def limit(count: int, tests: int) -> float:
    """Return the x with P(x, count) = ALARM / 2 tests, in medians of `count` distances."""
    target = np.log(ALARM / 2 / max(tests, 1))
    terms = count - np.arange((count + 1) // 2)
    low, high = 0.0, 1.0
    while -np.log1p(high / terms).sum() > target:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if -np.log1p(middle / terms).sum() > target else (low, middle)
    return high


def with_history(finite: Flags) -> Flags:
    """Return which values of a table (tensors, steps) have a history that is long enough."""
    return np.asarray(finite & (np.cumsum(finite, axis=1) > BEFORE + LEAST))


def transform(values: Floats, positive: bool) -> NDArray[np.float64]:
    """Return the values on the scale of the test: logarithms of positive statistics."""
    wide = values.astype(np.float64)
    return np.log(np.maximum(wide, TINY)) if positive else wide


def history(values: Floats, finite: Flags, positive: bool, tests: int) -> History:
    """Compare each value with those before it in its row. finite: the values to use; others are left out.

    tests: the number of values tested in the run, of all tables.
    """
    filled = [np.full(values.shape, np.nan, dtype=np.float32) for _ in range(4)]
    for rows, steps in _alike(finite):
        if len(steps) <= BEFORE + LEAST:
            continue
        found = _deviations(transform(values[np.ix_(rows, steps)], positive), positive, tests)
        for whole, part in zip(filled, found, strict=True):
            whole[np.ix_(rows, steps)] = part
    _limit_by_tail(filled[0], filled[1], tests)
    if positive:
        filled[2] = np.exp(filled[2])
    return History(*filled)


def against(values: Floats, reference: Floats, finite: Flags, envelope: History, positive: bool) -> History:
    """Compare each value with that of a reference run at the same step; the unit is the reference's own.

    finite: where both runs have a value. Runs on the same batches differ by less than the noise of one of them.
    """
    difference = transform(values, positive) - transform(reference, positive)
    units = np.where(finite, difference / envelope.scale, np.nan).astype(np.float32)
    return History(units, envelope.limits, reference, envelope.scale)


def _alike(finite: Flags) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Group the rows that have values at the same steps. Returns rows and steps of each group."""
    groups: dict[bytes, list[int]] = {}
    for row, flags in enumerate(finite):
        groups.setdefault(np.packbits(flags).tobytes(), []).append(row)
    return [(np.array(rows), np.flatnonzero(finite[rows[0]])) for rows in groups.values()]


def _deviations(
    series: NDArray[np.float64], positive: bool, tests: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return units, limits, expected values and scales. series: (tensors, steps), all finite."""
    shape = series.shape
    units, limits, expected, scale = (np.full(shape, np.nan) for _ in range(4))
    expected[:, BEFORE:] = _running_median(series[:, :-1])
    distances = series - expected
    sizes = np.abs(distances)
    for start in range(BEFORE + LEAST, shape[1], BLOCK):
        count = min(start - BEFORE, WINDOW)
        count -= 1 - count % 2
        block = slice(start, start + BLOCK)
        unit = np.median(sizes[:, start - count : start], axis=1, keepdims=True)
        least = ROUNDING if positive else ROUNDING * np.abs(expected[:, start : start + 1]) + TINY
        scale[:, block] = np.maximum(unit, least)
        limits[:, block] = limit(count, tests)
    units = distances / scale
    return units, limits, expected, scale


def _limit_by_tail(units: Floats, limits: Floats, tests: int) -> None:
    """Replace limits by those of the tail of the deviations before, where it has enough. Anomalies are no tail."""
    sizes = np.abs(units)
    steps = units.shape[1]
    for start in range(BEFORE + LEAST, steps, BLOCK):
        block, before = slice(start, start + BLOCK), slice(max(0, start - TAIL_STEPS), start)
        with np.errstate(invalid="ignore"):
            usable = sizes[:, before] <= limits[:, before]
        past = sizes[:, before][usable]
        if not len(past):
            continue
        bound = np.partition(past, int((1 - TAIL) * len(past)))[int((1 - TAIL) * len(past))]
        over = usable & (sizes[:, before] > bound)
        count = over.any(axis=0).sum()
        if count < LEAST_EXCESSES:
            continue
        excesses = np.where(over, sizes[:, before] - bound, 0.0)
        counts = over.sum(axis=1)
        share = counts / np.maximum(usable.sum(axis=1), 1)
        common = _tail_limit(excesses.sum() / counts.sum(), count, np.array(TAIL), tests)
        single = _tail_limit(
            excesses.sum(axis=1) / np.maximum(counts, 1), np.maximum(counts, 1), share, tests
        )
        own = np.where(counts < LEAST_EXCESSES, 0.0, single)
        found = bound + np.maximum(common, own)[:, None]
        limits[:, block] = np.minimum(limits[:, block], found)  # NaN where a row has too short a history


def _tail_limit(mean: Any, count: Any, share: NDArray[np.float64], tests: int) -> NDArray[np.float64]:
    """Return the excess with P = ALARM / 2 tests. mean: of count excesses. share: of values in the tail."""
    exponent = np.log(np.maximum(share * 2 * max(tests, 1) / ALARM, 1.0)) / count
    return np.asarray(mean * count * np.expm1(np.minimum(exponent, 50.0)))


def _running_median(series: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each BEFORE successive values of each row, in chunks that bound the memory."""
    windows = np.lib.stride_tricks.sliding_window_view(series, BEFORE, axis=1)
    rows = max(1, CHUNK // max(1, windows.shape[1] * BEFORE))
    return np.concatenate([np.median(windows[at : at + rows], axis=2) for at in range(0, len(windows), rows)])
