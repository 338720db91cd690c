"""Find jumps of a curve: values far from a robust running scale. The triggers, trend and diagnose all ask this module.

The expected value is the median of the last RECENT values. The scale is the median absolute difference of the last
WINDOW successive values, as a normal distribution's standard deviation (von Neumann's successive differences), and at
least the floor of the quantity. A value jumps where it is over LIMIT scales from the expected one. A spike is a jump
upwards that returns.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
WINDOW = 64  # values that the scale is computed from
LEAST = 16  # values before the first jump
RECENT = 16  # values whose median is the expected value
LIMIT = 8.0  # standard deviations from the expected value
NORMAL = 1.4826 / 2**0.5  # standard deviation over the median absolute successive difference
RETURN = 100  # values within which a spike returns
CHUNK = 50_000  # windows at once
TINY = 1e-37  # replaces zero on a log scale


@dataclass(frozen=True)
class Quantity:
    """How values of a kind are compared. least, share: the floor of the scale, and that as a part of the value."""

    log: bool
    least: float
    share: float = math.inf

    def floor(self, center: Any) -> Any:
        """Return the least scale near expected values; the smaller one of `least` and the share."""
        return np.minimum(self.least, self.share * np.maximum(np.abs(center), TINY))

    def transformed(self, values: Any) -> Any:
        """Return values on the scale of the comparison."""
        return np.log(np.maximum(values, TINY)) if self.log else np.asarray(values, dtype=np.float64)

    def restored(self, values: Any) -> Any:
        """Return values of that scale as those of the quantity."""
        return np.exp(values) if self.log else values


LOSS = Quantity(False, 0.02, 0.005)  # nats: a jump is at least 0.16, or 4 percent of a loss below 4
NORM = Quantity(True, 0.288)  # of small batches, with a long tail: a jump is at least a factor of 10
TENSOR = Quantity(True, 0.4)  # the norm of one of many tensors: a factor of 25
LOGIT = Quantity(False, 0.5)  # a jump is at least 4


class Outlier:
    """Values far above the ones before, one after another. values: the last WINDOW, on the scale of the comparison."""

    def __init__(self, quantity: Quantity, limit: float = LIMIT, values: Iterable[float] = ()) -> None:
        self.quantity, self.limit = quantity, limit
        self.values: deque[float] = deque(values, maxlen=WINDOW)

    def observe(self, value: float) -> float | None:
        """Append the value. Returns the bound that it exceeds, or None."""
        bound, here = None, float(self.quantity.transformed(value))
        if len(self.values) >= LEAST:
            center = median(list(self.values)[-RECENT:])
            steps = (abs(after - before) for before, after in itertools.pairwise(self.values))
            scale = max(NORMAL * median(steps), float(self.quantity.floor(center)))
            bound = center + self.limit * scale
        self.values.append(here)
        return float(self.quantity.restored(bound)) if bound is not None and here > bound else None


def expected(series: Floats, quantity: Quantity) -> tuple[Floats, Floats]:
    """Return the expected value and the scale of each value (..., T) from those before it in its row.

    series: finite, on the scale of the comparison. The first LEAST values of a row have NaN.
    """
    center, scale = (np.full(series.shape, np.nan) for _ in range(2))
    if series.shape[-1] <= LEAST:
        return center, scale
    steps = np.abs(np.diff(series))
    for position in range(LEAST, min(WINDOW, series.shape[-1])):
        scale[..., position] = np.median(steps[..., : position - 1], axis=-1)
    center[..., LEAST:] = _running_median(series[..., :-1], RECENT)
    if series.shape[-1] > WINDOW:
        scale[..., WINDOW:] = _running_median(steps[..., :-1], WINDOW - 1)
    return center, np.maximum(NORMAL * scale, quantity.floor(center))


def find_spikes(values: Floats, quantity: Quantity = LOSS) -> list[tuple[int, int]]:
    """Return the first and last position of each spike of a series. Values that are not finite are left out."""
    places = np.flatnonzero(np.isfinite(values))
    series = quantity.transformed(values[places])
    found: list[tuple[int, int]] = []
    center, scale = expected(series, quantity)
    limit = center + LIMIT * scale
    position = LEAST
    while position < len(series):
        if not series[position] > limit[position]:
            position += 1
            continue
        after = np.flatnonzero(series[position : position + RETURN] <= limit[position])
        if len(after) == 0:  # another level, or the end of the series
            position += RECENT
            continue
        last = position + int(after[0]) - 1
        found.append((int(places[position]), int(places[last])))
        position = last + 1
    return found


def _running_median(values: Floats, width: int) -> Floats:
    """Return the median of each window of a row, in chunks that bound the memory."""
    windows = np.lib.stride_tricks.sliding_window_view(values, width, axis=-1)
    count = max(1, CHUNK // max(1, math.prod(windows.shape[:-2])))
    chunks = [
        np.median(windows[..., at : at + count, :], axis=-1) for at in range(0, windows.shape[-2], count)
    ]
    return np.concatenate(chunks, axis=-1)
