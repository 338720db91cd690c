"""The scale of the terms that a gradient is the sum of, where these may cancel.

Rounding is relative to the terms of a sum. A gradient that is much smaller than its terms differs between correct
kernels by much more than its own size explains. The terms are known in four cases.

1. A tensor that several calls read has the sum of the gradients that they return.
2. The gradient of a bias sums n received gradients of the size r: n r, for their errors may have one sign, as that of
   the mean that a BatchNorm subtracts.
3. A product of a and b sums n = sqrt(|a| |b| / |result|) products of random signs: sqrt(n) rms(a) rms(b).
4. With x^ = (x - m) / s and y = w x^ + b, the backward of a normalisation returns

       dx = (h - mean(h) - x^ mean(h x^)) / s,  h = w dy

   and no term exceeds rms(h) / s. They cancel where dy changes the mean and the norm alone, as that of the loss
   mean(y^2) does. Here s is the spread of x over the whole tensor. It is at least the quadratic mean of s over the
   rows, so the terms are not overestimated. RMSNorm has m = 0. With running statistics, nothing is subtracted.
"""

from __future__ import annotations

import math
import re

from numerics.compare.step_record import Call, StepRecord, Value

NORMALISATION = re.compile(r"(layer|rms|group|batch|instance)_?norm(\dd)?$", re.IGNORECASE)
PRODUCT = re.compile(r"linear|conv|matmul|mm$|einsum|dot$", re.IGNORECASE)


def gradient_scale(backward: Call, forward: Call | None, side: str, place: str, gradient: Value) -> float:
    """Return the rms of the sum of a gradient's terms by cases 2 and 3; 0 where it is unknown."""
    received = max((value for value in backward.inputs.values() if value.norm), key=_norm, default=None)
    if received is None or not gradient.shape:
        return 0.0
    if len(gradient.shape) == 1:
        terms = received.count / max(gradient.count, 1)
        return _rms(received) * terms
    if forward is None or not PRODUCT.search(forward.type or forward.path):
        return 0.0
    factors = {("output", place): value for place, value in _tensors(forward.inputs).items()}
    factors |= {("gradient", place): value for place, value in forward.parameters.items()}
    others = [value for at, value in factors.items() if at != (side, place) and len(value.shape) > 1]
    other = max(others, key=_rms, default=None)
    if other is None:
        return 0.0
    inner = math.sqrt(received.count * other.count / max(gradient.count, 1))
    scale = _rms(received) * _rms(other) * math.sqrt(inner)
    return scale if math.isfinite(scale) else 0.0


class Terms:
    """The terms of the gradients in a comparison, by cases 1 and 4."""

    def __init__(self, golden: StepRecord) -> None:
        self.golden = golden
        self.backward = {call.forward_name: call for call in golden.calls.values() if call.backward}
        self.readers: dict[object, list[tuple[str, str]]] = {}  # of a tensor: calls and places
        for name, call in golden.calls.items():
            if name in self.backward:
                for place, value in _tensors(call.inputs).items():
                    self.readers.setdefault(_key(value), []).append((name, place))

    def readers_of(self, backward: Call, place: str) -> list[str]:
        """Return the backward of the calls that read a result of a forward; empty where one is not recorded."""
        forward = self.golden.calls.get(backward.forward_name)
        value = _tensors(forward.outputs).get(place) if forward else None
        if value is None:
            return []
        return [
            self.backward[name].name for name, _ in self.readers.get(_key(value), []) if name in self.backward
        ]

    def scale(self, call: Call | None, side: str, place: str) -> float:
        """Return the rms of the terms of a golden backward's input or output; 0 where they are unknown."""
        forward = self.golden.calls.get(call.forward_name) if call else None
        if call is None or forward is None or not call.backward:
            return 0.0
        of = _tensors(forward.inputs if side == "output" else forward.outputs)
        if place not in of:
            return 0.0
        scale = self._summed(of[place], forward.name if side == "output" else "")
        is_first = side == "output" and place == "0"
        return max(scale, _subtracted(call, forward, of["0"])) if is_first else scale

    def _summed(self, value: Value, around: str) -> float:
        """Return the largest rms of the gradients that the readers of a tensor return. around: a call, "" for all."""
        parts = [
            _rms(self.backward[name].outputs.get(place))
            for name, place in self.readers.get(_key(value), [])
            if not around or around in self.golden.around(name)
        ]
        return max((part for part in parts if math.isfinite(part)), default=0.0)


def _subtracted(backward: Call, forward: Call, x: Value) -> float:
    """Return the rms of the terms in a normalisation's backward; 0 where the call is none or they are unknown."""
    found = NORMALISATION.search(backward.type or backward.path)
    received = next((value for value in backward.inputs.values() if value.floating), None)
    if not found or x.mean is None or x.norm is None or _has_running_statistics(forward):
        return 0.0
    mean = 0.0 if found[1].lower() == "rms" else x.mean
    spread = _rms(x) ** 2 - mean**2
    weight = _weight(forward)
    scale = _rms(received) * (_rms(weight) if weight else 1.0)
    scale = scale / math.sqrt(spread) if spread > 0 else 0.0
    return scale if math.isfinite(scale) else 0.0


def _has_running_statistics(forward: Call) -> bool:
    training = forward.settings.get("training")
    if not forward.is_module:
        training = next((value.plain for value in forward.inputs.values() if value.kind == "bool"), None)
    return training is False


def _weight(forward: Call) -> Value | None:
    if forward.is_module:
        return forward.parameters.get("weight")
    running = forward.path.endswith(("batch_norm", "instance_norm"))  # running mean and variance come before
    return forward.inputs.get("weight") or forward.inputs.get("3" if running else "2")


def _tensors(values: dict[str, Value]) -> dict[str, Value]:
    """Return the tensors by the place of their gradients."""
    return {str(index): value for index, value in enumerate(v for v in values.values() if v.dtype)}


def _norm(value: Value) -> float:
    return value.norm or 0.0


def _rms(value: Value | None) -> float:
    return value.norm / math.sqrt(max(value.count, 1)) if value and value.norm else 0.0


def _key(value: Value) -> tuple[object, ...]:
    return value.dtype, value.shape, value.statistics
