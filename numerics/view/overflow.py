"""Grade the overflow of a call, section 4.4.

    critical  normal input, abnormal output
    high      abnormal input and output, or a jump: an output's norm is more than 100 times the largest of an input
    medium    abnormal input, normal output

Abnormal is a tensor with a NaN or an infinity. The order, the threshold and the exceptions are msProbe's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from numerics.compare.step_record import Call, Value

CRITICAL, HIGH, MEDIUM = "critical", "high", "medium"
LEVELS = (CRITICAL, HIGH, MEDIUM)
JUMP = 100.0  # times the norm of the inputs

# Inputs that may hold anything, because the function overwrites them.
OVERWRITTEN = {
    "Tensor.masked_fill_": ("0",),
    "Distributed.recv": ("0", "tensor"),
    "Distributed.all_gather": ("0",),
    "Distributed.reduce_scatter": ("0", "output"),
    "Distributed._reduce_scatter_base": ("0",),
    "Distributed.all_gather_into_tensor": ("0",),
    "Distributed.reduce_scatter_tensor": ("0",),
}
UNINITIALISED = ("Torch.empty", "Torch.empty_like", "Torch.empty_strided")


def overflow_level(call: Call | None) -> str:
    """Return the level of a call, "" for none."""
    if call is None or call.path in UNINITIALISED:
        return ""
    allowed = OVERWRITTEN.get(call.path, ())
    bad_inputs = [place for place in _abnormal(call.inputs) if place.partition(".")[0] not in allowed]
    bad_outputs = _abnormal(call.outputs)
    if bad_outputs:
        return HIGH if bad_inputs else CRITICAL
    if bad_inputs:
        return MEDIUM
    return HIGH if _jumps(call) else ""


def _abnormal(values: Mapping[str, Value]) -> list[str]:
    return [place for place, value in values.items() if value.dtype and _is_abnormal(value)]


def _is_abnormal(value: Value) -> bool:
    """Return whether a NaN or an infinity is in the tensor. An infinite norm alone is none: squares overflow early."""
    if value.nan_count is not None or value.inf_count is not None:
        return bool(value.nan_count or value.inf_count)
    numbers = (value.highest, value.lowest, value.mean)
    return any(number is not None and not math.isfinite(number) for number in numbers)


def _jumps(call: Call) -> bool:
    before, after = _largest_norm(call.inputs.values()), _largest_norm(call.outputs.values())
    return before is not None and after is not None and after > JUMP * (before or 1.0)


def _largest_norm(values: Iterable[Value]) -> float | None:
    norms = [value.norm for value in values if value.norm is not None and not math.isnan(value.norm)]
    return max(norms, default=None)
