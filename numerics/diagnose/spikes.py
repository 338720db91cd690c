"""Find spikes: values far above a robust running scale that return to it.

The scale is the median absolute difference of successive values, as a normal distribution's standard deviation (von
Neumann's successive differences). The expected value is the median of the last few. A level that does not return is
no spike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
WINDOW = 64  # values that the scale is computed from
LEAST = 16  # values before the first spike
RECENT = 16  # values whose median is the expected value
LIMIT = 8.0  # standard deviations above the expected value
NORMAL = 1.4826 / 2**0.5  # standard deviation over the median absolute successive difference
LEAST_SCALE = 0.005  # of the expected value: a spike exceeds it by at least 4 percent
RETURN = 100  # values within which a spike returns
CHUNK = 50_000  # windows


@dataclass(frozen=True)
class CurveSpike:
    """A spike: its first and last position, the largest value and the expected one."""

    first: int
    last: int
    value: float
    expected: float


def find_spikes(values: Floats) -> list[CurveSpike]:
    """Return the spikes of a series. Values that are not finite are spikes of no kind, and are left out."""
    places = np.flatnonzero(np.isfinite(values))
    series = values[places]
    found: list[CurveSpike] = []
    position = LEAST
    center, limit = _expected(series)
    while position < len(series):
        if not series[position] > limit[position]:
            position += 1
            continue
        expected, bound = center[position], limit[position]
        after = np.flatnonzero(series[position : position + RETURN] <= bound)
        if len(after) == 0:  # another level, or the end of the series
            position += RECENT
            continue
        last = position + int(after[0]) - 1
        highest = float(series[position : last + 1].max())
        found.append(CurveSpike(int(places[position]), int(places[last]), highest, float(expected)))
        position = last + 1
    return found


def _expected(series: Floats) -> tuple[Floats, Floats]:
    """Return the expected value and the least value of a spike, at each position, from the values before it."""
    center, scale = np.full(len(series), np.inf), np.zeros(len(series))
    steps = np.abs(np.diff(series))
    for position in range(LEAST, min(WINDOW, len(series))):
        scale[position] = np.median(steps[: position - 1])
    if len(series) > LEAST:
        center[LEAST:] = _running_median(series[:-1], RECENT)
    if len(series) > WINDOW:
        scale[WINDOW:] = _running_median(steps[:-1], WINDOW - 1)
    return center, center + LIMIT * np.maximum(NORMAL * scale, LEAST_SCALE * np.abs(center))


def _running_median(values: Floats, width: int) -> Floats:
    """Return the median of each window, in chunks that bound the memory."""
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    chunks = [np.median(windows[at : at + CHUNK], axis=1) for at in range(0, len(windows), CHUNK)]
    return np.concatenate(chunks)
