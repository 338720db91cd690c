"""Measure gradients relative to the terms that they are the sum of, where these may cancel.

Rounding is relative to the terms of a sum. A gradient that is much smaller than its terms differs between correct
kernels by much more than its own size explains. The terms are known in two cases.

A tensor that several calls read has the sum of the gradients that they return.

With x^ = (x - m) / s and y = w x^ + b, the backward of a normalisation returns

    dx = (h - mean(h) - x^ mean(h x^)) / s,  h = w dy

and no term exceeds rms(h) / s. They cancel where dy changes the mean and the norm alone, as that of the loss
mean(y^2) does. Here s is the spread of x over the whole tensor. It is at least the quadratic mean of s over the rows,
so the terms are not overestimated. RMSNorm has m = 0. With running statistics, nothing is subtracted.
"""

from __future__ import annotations

import math
import re

from numerics.compare.table.measure import compare_values
from numerics.compare.table.rows import CallRow
from numerics.compare.table.step_record import Call, StepRecord, Value

NORMALISATION = re.compile(r"(layer|rms|group|batch|instance)_?norm(\dd)?$", re.IGNORECASE)


class Terms:
    """The terms of the gradients in a comparison."""

    def __init__(self, golden: StepRecord) -> None:
        self.golden = golden
        self.backward = {call.forward_name: call for call in golden.calls.values() if call.backward}
        self.readers: dict[object, list[tuple[str, str]]] = {}  # of a tensor: calls and places
        for name, call in golden.calls.items():
            if name in self.backward:
                for place, value in _tensors(call.inputs).items():
                    self.readers.setdefault(_key(value), []).append((name, place))

    def error(self, row: CallRow, side: str) -> float:
        """Return the error of a side, of gradients relative to their terms. side: "input" or "output"."""
        call, forward = row.pair.golden, self.golden.calls.get(row.pair.call.forward_name)
        if call is None or forward is None or not call.backward:
            return row.error(side)
        of = _tensors(forward.inputs if side == "output" else forward.outputs)
        errors = [0.0]
        for cell in row.cells:
            if cell.side != side:
                continue
            scale = 0.0
            if cell.place in of:
                scale = self._summed(of[cell.place], forward.name if side == "output" else "")
                if side == "output" and cell.place == "0":
                    scale = max(scale, _subtracted(call, forward, of["0"]))
            beside = compare_values(cell.target, cell.golden, scale).error
            errors.append(min(cell.difference.error, beside))
        return max(errors)

    def _summed(self, value: Value, around: str) -> float:
        """Return the largest rms of the gradients that the readers of a tensor return. around: a call, "" for all."""
        parts = [
            _rms(self.backward[name].outputs.get(place))
            for name, place in self.readers.get(_key(value), [])
            if not around or self._is_within(name, around)
        ]
        return max((part for part in parts if math.isfinite(part)), default=0.0)

    def _is_within(self, name: str, around: str) -> bool:
        outer, visited = self.golden.within(name), {name}
        while outer is not None and outer not in visited:
            if outer == around:
                return True
            visited.add(outer)
            outer = self.golden.within(outer)
        return False


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


def _rms(value: Value | None) -> float:
    return value.norm / math.sqrt(max(value.count, 1)) if value and value.norm else 0.0


def _key(value: Value) -> tuple[object, ...]:
    return value.dtype, value.shape, value.statistics
