"""Tensors of a recorded call: the recorded values, or numbers with the recorded statistics."""

from __future__ import annotations

import dataclasses
import math
import zlib

import torch
from torch import Tensor

from numerics.compare.replay import NotReplayableError
from numerics.compare.table.measure import load
from numerics.compare.table.step_record import Value


def tensor_of(value: Value, name: str, rows: int | None = None) -> Tensor:
    """Return the recorded tensor, or a generated one of the same shape, dtype and range.

    name: seeds the numbers. rows: the first of them alone.
    """
    if value.has_values:
        return load(value)[:rows] if rows else load(value)
    return generated(dataclasses.replace(value, shape=(rows, *value.shape[1:])) if rows else value, name)


def generated(value: Value, name: str) -> Tensor:
    """Return numbers of the shape, dtype, range, mean and norm of a recorded tensor, with as many NaN and Inf.

    Floating numbers are normal, cut at the recorded minimum and maximum, which both occur. Integers are uniform in the
    range. Square truth values, and square scores with -inf, are causal. Equal on every machine for the same name.
    """
    dtype = getattr(torch, value.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex:
        raise NotReplayableError(f"values of {value.dtype} are not generated")
    draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    shape = value.shape
    square = len(shape) > 1 and shape[-1] == shape[-2]
    if dtype == torch.bool:
        return _truth_values(value, draws, square)
    if not dtype.is_floating_point:
        low, high = int(value.lowest or 0), int(value.highest or 0)
        drawn = torch.randint(low, high + 1, shape, generator=draws)
        return _with_ends(drawn.double(), low, high).to(dtype)
    ends = [
        number for number in (value.lowest, value.highest) if number is not None and math.isfinite(number)
    ]
    mean = value.mean if value.mean is not None and math.isfinite(value.mean) else 0.0
    if value.norm is not None and math.isfinite(value.norm) and value.count:
        spread = math.sqrt(max(value.norm**2 / value.count - mean**2, 0.0))
    else:
        spread = (ends[-1] - ends[0]) / 6 if len(ends) == 2 else 1.0
    numbers = torch.randn(shape, generator=draws, dtype=torch.float64) * spread + mean
    if len(ends) == 2:
        numbers = _with_ends(numbers.clamp(*ends), *ends)
    if value.lowest == -math.inf and square:  # scores, or a mask of 0 and -inf
        numbers = numbers if value.highest else torch.zeros_like(numbers)
        return numbers.masked_fill(torch.ones(shape[-2:], dtype=torch.bool).triu(1), -math.inf).to(dtype)
    flat = numbers.view(-1)
    infinity = -math.inf if value.lowest == -math.inf else math.inf
    bad = [math.nan] * (value.nan_count or 0) + [infinity] * (value.inf_count or 0)
    flat[: len(bad)] = torch.tensor(bad[: len(flat)], dtype=torch.float64)
    return numbers.to(dtype)


def _truth_values(value: Value, draws: torch.Generator, square: bool) -> Tensor:
    if value.lowest or not value.highest:
        return torch.full(value.shape, bool(value.lowest))
    if square:
        return torch.ones(value.shape, dtype=torch.bool).tril()
    return torch.randint(2, value.shape, generator=draws).bool()


def _with_ends(numbers: Tensor, low: float, high: float) -> Tensor:
    """Put both ends of the range where the smallest and the largest number are."""
    flat = numbers.contiguous().view(-1)
    if flat.numel():
        flat[int(flat.argmin())], flat[int(flat.argmax())] = low, high
    return flat.view(numbers.shape)
