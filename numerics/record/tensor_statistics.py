"""Compute what a record holds of a tensor: type, shape, statistics, digests.

Statistics and digests are scalars on the device of the tensor, until `resolve` moves all of them at once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten

from numerics.describe import NoValuesError, plain_values, unwrapped
from numerics.record.tensor_digest import value_digests

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
    except (NoValuesError, RuntimeError, NotImplementedError, TypeError) as error:
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
