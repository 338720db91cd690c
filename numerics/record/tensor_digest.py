"""Hash a tensor on its own device, without a transfer and without a sum whose order matters.

    digest = sum over i of w_i x_i mod 2^64

x_i are the bits of element i as an integer, w_i odd numbers that depend on i. Integer addition modulo 2^64 gives the
same result in any order. One changed element always changes the digest, because an odd factor is invertible.
A tensor that consists of several, such as a sparse one, has the weighted sum of their digests and of a checksum of
their shapes and dtypes. The sum of x_i + C x_i^2, with C odd, is equal for the same values in any order.
"""

from __future__ import annotations

import functools
import math
import zlib

import numpy as np
import torch
from torch import Tensor

from numerics.describe import is_wrapped, parts_of, plain_values, unwrapped

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
