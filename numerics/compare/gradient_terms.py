"""The scale of the terms that a gradient is the sum of, where these may cancel.

Rounding is relative to the terms of a sum. A gradient that is much smaller than its terms differs between correct
kernels by much more than its own size explains. The terms are known in three cases.

1. The gradient of a bias sums n received gradients of the size r: n r, for their errors may have one sign, as that of
   the mean that a BatchNorm subtracts.
2. A product of a and b sums n = sqrt(|a| |b| / |result|) products of random signs: sqrt(n) rms(a) rms(b).
3. With x^ = (x - m) / s and y = w x^ + b, the backward of a normalisation returns

       dx = (h - mean(h) - x^ mean(h x^)) / s,  h = w dy

   and no term exceeds rms(h) / s. They cancel where dy changes the mean and the norm alone, as that of the loss
   mean(y^2) does. Here s is the spread of x over the whole tensor. It is at least the quadratic mean of s over the
   rows, so the terms are not overestimated. RMSNorm has m = 0.
"""

from __future__ import annotations

import math
import re

from numerics.compare.step_record import Call, Value

PRODUCT = re.compile(r"linear|conv|matmul|mm$|einsum|dot$", re.IGNORECASE)
NORMALISATION = re.compile(r"(layer|rms|group|batch|instance)_?norm(\dd)?$", re.IGNORECASE)


def sum_scale(backward: Call, forward: Call | None, side: str, place: str, gradient: Value) -> float:
    """Return the rms of the sum of a gradient's terms by cases 1 and 2; 0 where it is unknown."""
    values = (value for value in backward.inputs.values() if value.norm)
    received = max(values, key=lambda value: value.norm or 0.0, default=None)
    if received is None or not gradient.shape:
        return 0.0
    if len(gradient.shape) == 1:
        return _rms(received) * received.count / max(gradient.count, 1)
    if forward is None or not PRODUCT.search(forward.type or forward.path):
        return 0.0
    tensors = [value for value in forward.inputs.values() if value.dtype]
    factors = {("output", str(index)): value for index, value in enumerate(tensors)}
    factors |= {("gradient", at): value for at, value in forward.parameters.items()}
    others = [value for at, value in factors.items() if at != (side, place) and len(value.shape) > 1]
    other = max(others, key=_rms, default=None)
    if other is None:
        return 0.0
    inner = math.sqrt(received.count * other.count / max(gradient.count, 1))
    scale = _rms(received) * _rms(other) * math.sqrt(inner)
    return scale if math.isfinite(scale) else 0.0


def normalisation_scale(backward: Call | None, forward: Call | None) -> float:
    """Return the rms of the terms in a normalisation's backward; 0 where the call is none or they are unknown."""
    found = NORMALISATION.search(backward.type or backward.path) if backward else None
    if backward is None or forward is None or not found:
        return 0.0
    x = next((value for value in forward.inputs.values() if value.dtype), None)
    received = next((value for value in backward.inputs.values() if value.floating), None)
    if x is None or x.mean is None or x.norm is None:
        return 0.0
    mean = 0.0 if found[1].lower() == "rms" else x.mean
    spread = _rms(x) ** 2 - mean**2
    weight = _weight(forward)
    scale = _rms(received) * (_rms(weight) if weight else 1.0)
    scale = scale / math.sqrt(spread) if spread > 0 else 0.0
    return scale if math.isfinite(scale) else 0.0


def _weight(forward: Call) -> Value | None:
    if forward.is_module:
        return forward.parameters.get("weight")
    running = forward.path.endswith(("batch_norm", "instance_norm"))  # running mean and variance come before
    return forward.inputs.get("weight") or forward.inputs.get("3" if running else "2")


def _rms(value: Value | None) -> float:
    return value.norm / math.sqrt(max(value.count, 1)) if value and value.norm else 0.0
