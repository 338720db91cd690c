"""Compute what a record holds of a tensor: type, shape, statistics, digests.

Statistics and digests are scalars on the device of the tensor, until `resolve` moves all of them at once.
"""

from __future__ import annotations

import functools
import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten

from referee.numerics.describe import NoValuesError, is_wrapped, parts_of, plain_values, unwrapped

PART = 1 << 18  # elements that are hashed at once; their products need 2 MiB
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: Tensor) -> Tensor:
    """Return the digest of the values in row-major order: an int64 scalar on the tensor's device.

    NoValuesError for a tensor whose values cannot be read, such as a fake one.
    """
    if is_wrapped(tensor):
        with unwrapped(tensor) as inner:
            return digest(inner)
    parts = parts_of(tensor)
    if len(parts) == 1:
        return _digest(parts[0])
    forms = repr([(tuple(part.shape), part.dtype) for part in parts])
    if not tensor.is_nested:
        forms += repr((tuple(tensor.shape), tensor.dtype, tensor.layout))
    found = [_digest(part).to(parts[0].device) * _part_factor(n) for n, part in enumerate(parts)]
    return torch.stack(found).sum() + zlib.crc32(forms.encode())


def value_digests(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a digest of the values in row-major order, and one of the values in any order, as int64 scalars.

    In contrast to `digest`, -0.0 counts as 0.0 and every NaN as the same.
    """
    parts = parts_of(tensor)
    ordered = torch.zeros((), dtype=torch.int64, device=parts[0].device)
    any_order, weights = ordered.clone(), _weights(str(ordered.device))
    for number, part in enumerate(parts):
        for place, block in enumerate(_numbers(part).split(PART)):
            bits = bits_of(_canonical(block)).to(torch.int64)
            ordered += _dot(bits, weights[: len(bits)]) * _part_factor(place) * _part_factor(number)
            any_order += bits.sum() + _dot(bits, bits) * _part_factor(0)
    return ordered, any_order


def _numbers(tensor: Tensor) -> Tensor:
    """Return the elements, flat: of complex numbers the real ones, of other types than floating-point their bits."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    packed = tensor.dtype == getattr(torch, "float4_e2m1fn_x2", None)
    return bits_of(tensor) if packed or not tensor.is_floating_point() else tensor.reshape(-1)


def _canonical(flat: Tensor) -> Tensor:
    if not flat.is_floating_point():
        return flat
    flat = flat.float() if flat.element_size() == 1 else flat
    return flat.nan_to_num(math.nan, math.inf, -math.inf).add_(0.0)  # a third of the time of isnan and where


def _digest(tensor: Tensor) -> Tensor:
    flat = bits_of(tensor)
    weights = _weights(str(flat.device))
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for place, block in enumerate(flat.split(PART)):
        total += _dot(block.to(torch.int64), weights[: len(block)]) * _part_factor(place)
    return total


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum of products modulo 2^64. torch.dot has integers on the CPU alone."""
    return torch.dot(first, second) if first.device.type == "cpu" else (first * second).sum()


def bits_of(tensor: Tensor) -> Tensor:
    """Return the elements as integers of the same size, flat; complex numbers as pairs."""
    values = plain_values(tensor)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    flat = values.contiguous().reshape(-1)
    return flat.view(INTEGERS[flat.element_size()])


def is_finite(tensor: Tensor) -> bool:
    """Return whether every value that can be read is finite."""
    try:
        return bool(plain_values(tensor.detach()).isfinite().all())
    except Exception:  # values that cannot be read are in the trace's `unknown`
        return True


@functools.lru_cache(maxsize=16)
def _weights(device: str) -> Tensor:
    return torch.from_numpy(_array_weights()).to(device)


@functools.cache
def _array_weights() -> np.ndarray:
    return _odd(np.arange(PART, dtype=np.uint64))


@functools.lru_cache(maxsize=1 << 12)
def _part_factor(number: int) -> int:
    return int(_odd(np.array([number + PART], dtype=np.uint64))[0])


def _odd(numbers: np.ndarray) -> np.ndarray:
    """Return odd 64-bit numbers by splitmix64, equal on every machine and version."""
    with np.errstate(over="ignore"):
        z = (numbers + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


ROW = 1024  # elements whose squares are added at once


def describe_tensor(tensor: Tensor, checksums: bool) -> dict[str, Any]:
    """Return the entry of a tensor: Max, Min, Mean, Norm, counts of NaN and Inf.

    With `checksums` also "md5" and "any_order", of value_digests; the first has the name of msProbe's checksum.
    Mean and Norm are computed in float32 at least. A bool has Max (any) and Min (all), an integer Max and Min. A tensor
    that torch cannot reduce has "not_described" with torch's reason instead, so that recording ends no step.
    """
    entry: dict[str, Any] = {
        "type": "torch.Tensor",
        "dtype": str(tensor.dtype),
        "shape": [] if tensor.is_nested else list(tensor.shape),
        "Max": None,
        "Min": None,
        "Mean": None,
        "Norm": None,
        "requires_grad": tensor.requires_grad,
    }
    if isinstance(tensor, nn.Parameter):
        entry["is_parameter"] = True
    if tensor.is_nested or tensor.layout is not torch.strided:
        entry["layout"] = "nested" if tensor.is_nested else str(tensor.layout)
    try:
        if tensor.is_meta or not tensor.numel():
            return entry
        with torch.no_grad(), unwrapped(tensor) as inner:
            try:
                entry |= _statistics(plain_values(inner))
            finally:  # digests also where torch has no statistics, as of float4
                if checksums:
                    composed = inner.is_nested or is_traceable_wrapper_subclass(inner)
                    found = value_digests(inner if composed else plain_values(inner))
                    entry["md5"], entry["any_order"] = (value.view(torch.uint64) for value in found)
    except (NoValuesError, RuntimeError, TypeError) as error:
        entry["not_described"] = str(error).strip().partition("\n")[0]
    return entry


def _statistics(tensor: Tensor) -> dict[str, Any]:
    if tensor.dtype == torch.bool:
        return {"Max": tensor.any(), "Min": tensor.all()}
    if tensor.is_complex():
        tensor = tensor.abs()
    if not tensor.is_floating_point():
        wide_unsigned = tensor.dtype in (torch.uint16, torch.uint32, torch.uint64)  # without most operations
        low, high = (tensor.long() if wide_unsigned else tensor).aminmax()
        return {"Max": high, "Min": low}
    if tensor.element_size() == 1:  # float8 has few operations
        tensor = tensor.float()
    wide = tensor.dtype if tensor.element_size() >= 4 else torch.float32
    tensor = tensor.contiguous()  # so that the memory's layout does not change the order of the sums
    low, high = tensor.aminmax()  # NaN where one value is NaN
    found: dict[str, Any] = {"Max": high, "Min": low}
    found |= {"Mean": tensor.mean(dtype=wide), "Norm": _norm(tensor.view(-1), wide)}
    if tensor.device.type != "cpu":
        found |= {"nan_count": tensor.isnan().sum(), "inf_count": tensor.isinf().sum()}
    elif math.isfinite(found["Min"].item()) and math.isfinite(found["Max"].item()):
        found |= {"nan_count": 0, "inf_count": 0}
    else:
        found |= {"nan_count": int(tensor.isnan().sum()), "inf_count": int(tensor.isinf().sum())}
    return found


def _norm(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the Euclidean norm by those of rows: torch adds all squares of a long tensor in one partial sum."""
    whole = flat[: len(flat) // ROW * ROW].view(-1, ROW)
    rows = torch.linalg.vector_norm(whole, dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[len(flat) // ROW * ROW :], dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(torch.cat([rows, rest[None]]))
    return norm


def resolve(tree: Any) -> Any:
    """Replace the scalars in a tree of lists and dicts by numbers, with one transfer a device and dtype.

    Those of dtype uint64, as digests are, become hexadecimal texts of 16 digits.
    """
    leaves, form = tree_flatten(tree)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            groups.setdefault((leaf.device, leaf.dtype), []).append(place)
    for (_, dtype), places in groups.items():
        digests = dtype is torch.uint64  # of which devices have few operations
        scalars = [leaves[place].view(torch.int64) if digests else leaves[place] for place in places]
        for place, number in zip(places, torch.stack(scalars).tolist(), strict=True):
            leaves[place] = f"{number % (1 << 64):016x}" if digests else number
    return tree_unflatten(leaves, form)
