"""Tensors of a recorded call: the recorded values, or numbers with the recorded statistics.

Of a large call the first rows are taken, where each row of the result depends on one row of the inputs.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from numerics.compare.step_record import Call, Value
from numerics.compare.tensor_difference import load
from numerics.rounding.replayed_calls import NotReplayableError

# Of these, the first argument and the results have the same rows; other arguments belong to all rows.
FIRST = "linear linear_pointwise gelu relu silu tanh sigmoid exp log layer_norm rms_norm embedding".split()  # noqa: SIM905
# Of these, every tensor with as many rows as the first has these rows.
ALL = "scaled_dot_product_attention softmax log_softmax add sub mul truediv cross_entropy".split()  # noqa: SIM905


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


# -- the first rows


@dataclass(frozen=True)
class FirstRows:
    """The rows of a call that are checked. count: None for all."""

    count: int | None
    call: Call
    name: str

    def of_input(self, value: Value) -> int | None:
        """Return how many rows of an argument are checked; None for all."""
        return self.count if _has_rows(self.name, value, self.call) else None

    def of_result(self, value: Value) -> int | None:
        """Return how many rows of a result are checked; None for all."""
        return self.count if value.shape[:1] == _first(self.call).shape[:1] else None

    def has_result(self, value: Value) -> bool:
        """Return whether a result of the rows is a part of the result of the call."""
        return self.count is None or value.shape[:1] == _first(self.call).shape[:1]


def first_rows(name: str, call: Call, size: int, largest: int) -> FirstRows | None:
    """Return the rows that have at most `largest` of the call's elements; None where there are none.

    name: of the function. size: elements of the call.
    """
    if size <= largest:
        return FirstRows(None, call, name)
    plain = name.strip("_").removeprefix("i") if name.startswith("__i") else name.strip("_")
    if call.is_module or plain not in (*FIRST, *ALL) or not _first(call).shape:
        return None
    shared = sum(value.count for value in call.inputs.values() if not _has_rows(plain, value, call))
    count = (largest - shared) * _first(call).shape[0] // max(size - shared, 1)
    return FirstRows(count, call, plain) if count > 0 else None


def _first(call: Call) -> Value:
    return next((value for value in call.inputs.values() if value.dtype), Value(""))


def _has_rows(name: str, value: Value, call: Call) -> bool:
    first = _first(call)
    if value is first:
        return True
    same = bool(value.dtype) and value.shape[:1] == first.shape[:1]
    return same and name in ALL and (len(value.shape) == len(first.shape) or name == "cross_entropy")
