"""Measure how two recorded values differ.

The error of a tensor is relative to its scale, so that errors of different calls can be compared:

    values recorded   max(rms(x - y) / rms(y), max|x - y| / max|y|)
    statistics alone  max(|dNorm| / Norm, |dMax| / A, |dMin| / A, |dMean| / rms),  A = max(|Max|, |Min|)

In units of rounding it is divided by the machine epsilon of the dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from referee.errors import NumericsError
from referee.numerics.record.read_record import Value
from referee.numerics.record.tensor_statistics import bits_of
from referee.numerics.rounding.within_rounding import real

METRICS = ("cosine", "max_absolute", "max_relative", "mean_relative", "one_thousandth", "five_thousandth")

JOINED = 2.0**-20  # rounding of statistics in float32, which a joined tensor's are computed from


@dataclass(frozen=True)
class TensorDifference:
    """error: relative to the scale of the tensor; 0 where equal, infinite where it has no measure.

    what: the difference in words, "" where the numbers say all. metrics: by name; see METRICS.
    """

    equal: bool
    error: float = 0.0
    what: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


EQUAL = TensorDifference(True)


def epsilon(dtype: str) -> float:
    """Return the machine epsilon of a dtype such as "torch.float32"; 0 for integers, bools and packed numbers."""
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not (found.is_floating_point or found.is_complex):
        return 0.0
    try:
        return torch.finfo(found).eps
    except NotImplementedError:  # torch's answer for a dtype that packs two numbers in a byte
        return 0.0


def compare_values(target: Value | None, golden: Value | None, floor: float = 0.0) -> TensorDifference:
    """Compare two values. floor: a scale below which the rms of the golden tensor is not taken."""
    if target is None or golden is None:
        here = target or golden
        if here is None or not here.kind:
            return EQUAL  # None against absent
        side = "target" if target else "golden"
        return TensorDifference(False, math.inf, f"{here.describe()} in the {side} alone")
    if not target.dtype or not golden.dtype:
        if (target.kind, target.plain) == (golden.kind, golden.plain):
            return EQUAL
        return TensorDifference(False, math.inf, f"{target.describe()} against {golden.describe()}")
    if target.shape != golden.shape:
        return TensorDifference(False, math.inf, f"shape {list(target.shape)} against {list(golden.shape)}")
    same_type = target.dtype == golden.dtype
    if same_type and target.checksum and target.checksum == golden.checksum:
        return EQUAL
    if same_type and target.any_order and target.any_order == golden.any_order:
        return TensorDifference(False, math.inf, "the same values in another order")
    bad = _bad_numbers(target, golden)
    pair = load_pair(target, golden)
    joined = bool(target.parts or golden.parts) and pair is None and same_type
    if pair is not None:
        measured = _compare_tensors(*pair, floor)
    else:
        measured = _compare_statistics(target, golden, floor)
    if joined and not bad and measured.error <= JOINED:
        return EQUAL
    if measured.equal and same_type:
        checksums = target.checksum and golden.checksum
        unequal = TensorDifference(False, 0.0 if target.floating else math.inf, "checksum")
        return unequal if checksums and pair is None else EQUAL
    words = bad or ("" if same_type else f"{target.dtype} against {golden.dtype}")
    integers = not (target.floating and golden.floating)
    error = math.inf if bad or (integers and not measured.equal) else measured.error
    return TensorDifference(False, error, words, measured.metrics)


def load_pair(target: Value, golden: Value) -> tuple[Tensor, Tensor] | None:
    """Load both tensors, if both were recorded."""
    return (load(target), load(golden)) if target.has_values and golden.has_values else None


def load(value: Value) -> Tensor:
    """Load a recorded tensor."""
    if value.parts:
        parts = [load(part) for part in value.parts]
        return torch.stack(parts).sum(0) if value.axis is None else torch.cat(parts, value.axis)
    assert value.file is not None
    try:
        tensor: Any = torch.load(value.file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NumericsError(
            f"{value.file} cannot be loaded: {line[:200]}; fix: record the step again"
        ) from error
    if not isinstance(tensor, Tensor):
        raise NumericsError(f"{value.file} holds no tensor; fix: record the step again")
    if tuple(tensor.shape) != value.shape:
        raise NumericsError(
            f"{value.file} has shape {list(tensor.shape)}, dump.json says {list(value.shape)}; fix: record again"
        )
    return tensor.detach()


def _bad_numbers(target: Value, golden: Value) -> str:
    """Say where NaN or Inf is on one side alone, or in other numbers."""
    counted = None not in (target.nan_count, golden.nan_count)
    sides = [
        f"{value.nan_count} NaN and {value.inf_count} Inf"
        if counted
        else ("finite" if value.finite else "NaN or Inf")
        for value in (target, golden)
    ]
    return "" if sides[0] == sides[1] else " against ".join(sides)


def _compare_tensors(target: Tensor, golden: Tensor, floor: float) -> TensorDifference:
    if target.dtype == golden.dtype and torch.equal(bits_of(target), bits_of(golden)):
        return EQUAL
    x, y = real(target).reshape(-1), real(golden).reshape(-1)
    same = (x == y) | (x.isnan() & y.isnan())
    if bool(same.all()):
        return EQUAL if target.dtype == golden.dtype else TensorDifference(True)
    usable = x.isfinite() & y.isfinite()
    x, y = x[usable], y[usable]
    if not x.numel():
        return TensorDifference(False, math.inf)
    error, size = (x - y).abs(), y.abs()
    scale = max(float(size.square().mean().sqrt()), floor)
    highest = max(float(size.max()), floor)
    relative = error / size.clamp(min=torch.finfo(torch.float64).tiny)
    metrics = {
        "cosine": float(torch.nn.functional.cosine_similarity(x, y, dim=0)),
        "max_absolute": float(error.max()),
        "max_relative": float(relative.max()),
        "mean_relative": float(relative.mean()),
        "one_thousandth": float((relative < 1e-3).double().mean()),
        "five_thousandth": float((relative < 5e-3).double().mean()),
    }
    parts = (float(error.square().mean().sqrt()), scale), (float(error.max()), highest)
    return TensorDifference(False, max(_ratio(*part) for part in parts), "", metrics)


def _compare_statistics(target: Value, golden: Value, floor: float) -> TensorDifference:
    if all(_same(mine, other) for mine, other in zip(target.statistics, golden.statistics, strict=True)):
        return EQUAL
    root = math.sqrt(max(golden.count, 1))
    rms = max((golden.norm or 0.0) / root, floor)
    largest = max(abs(golden.highest or 0.0), abs(golden.lowest or 0.0), floor)
    high, low, mean, norm = map(_gap, target.statistics, golden.statistics)
    parts = ((high, largest), (low, largest), (mean, rms), (norm, rms * root))
    return TensorDifference(False, max(_ratio(*part) for part in parts), "", {"max_absolute": max(high, low)})


def _same(mine: float | None, other: float | None) -> bool:
    return mine == other or (
        mine is not None and other is not None and math.isnan(mine) and math.isnan(other)
    )


def _gap(mine: float | None, other: float | None) -> float:
    if mine is None or other is None or _same(mine, other):
        return 0.0
    gap = abs(mine - other)
    return gap if math.isfinite(gap) else math.inf


def _ratio(error: float, scale: float) -> float:
    if not error:
        return 0.0
    return error / scale if scale else math.inf
