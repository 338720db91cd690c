"""Reduce tensors of the CPU in chunks that fit in its cache, so that each element comes from memory once."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

CPU_CHUNK = 2**16  # elements of float32 and a copy of them: half a megabyte
CANCELLED = 0.5  # below this part of the squares, deviations are computed from the mean in float64


def cpu_row(part: Tensor) -> list[float]:
    """Return the Moments of one part after its count.

    numpy's comparisons and extremes take half the time of torch's, measured on one thread.
    """
    part = part if part.dtype in (torch.float32, torch.float64) else part.float()
    values = part.numpy()
    low, high = float(values.min()), float(values.max())  # nan where one element is
    nonzero = float(np.count_nonzero(values != 0)) if not (low > 0 or high < 0) else float(part.numel())
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 0.0, low, high, nonzero, float(np.isnan(values).sum()), float(np.isinf(values).sum())]
    mean, squares = float(part.mean()), float(torch.dot(part, part))
    deviations = squares - part.numel() * mean * mean
    if not deviations > CANCELLED * squares or not math.isfinite(squares):
        centred = part.double() - part.double().mean()
        mean, deviations = float(part.double().mean()), float(torch.dot(centred, centred))
    return [mean, deviations, low, high, nonzero, 0.0, 0.0]


def update_on_cpu(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Return the sums of squares of `before` and of the change, in chunks that fit in the cache."""
    weights = changes = 0.0
    pairs = zip(before.reshape(-1).split(CPU_CHUNK), after.detach().reshape(-1).split(CPU_CHUNK), strict=True)
    for one, other in pairs:
        one, other = (part if part.dtype == torch.float64 else part.float() for part in (one, other))
        weights += float(torch.dot(one, one))
        change = other - one
        changes += float(torch.dot(change, change))
    return weights, changes
