"""Run the calls of a pair in float64, each side on its own recorded inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from referee.numerics.compare.compared_rows import CallRow
from referee.numerics.compare.read_record import Call, Value
from referee.numerics.compare.tensor_difference import load
from referee.numerics.rounding.replayed_calls import LARGEST, NotReplayableError, RecordedCall, replay
from referee.numerics.rounding.within_rounding import BOUND, RANDOM


def replay_row(row: CallRow, forward: CallRow | None, layers: bool) -> None:
    """Set `replayed`: the errors of target and golden against the golden call, in units of a bound of BOUND.

    forward: of a backward. layers: whether calls of modules are replayed. A layer or a backward whose golden result is
    far from that of torch has a hook or another forward: it is not replayed.
    """
    target, golden = row.pair.target, row.pair.golden
    if target is None or golden is None or (golden.is_module and (golden.backward or not layers)):
        return
    if _result_places(target) != _result_places(golden):
        return
    with contextlib.suppress(NotReplayableError):
        if golden.backward:
            if forward is None or forward.pair.target is None or forward.pair.golden is None:
                return
            call = forward.pair.golden
            right = _gradient_error(call, call, golden)
            mine = _gradient_error(call, forward.pair.target, target)
        else:
            right = replayed_error(golden, golden.inputs, golden.outputs, golden.parameters)
            mine = replayed_error(golden, target.inputs, target.outputs, target.parameters)
        if right <= BOUND or not (golden.is_module or golden.backward):
            row.replayed = mine, right


def _result_places(call: Call) -> list[str]:
    return [place for place, value in call.outputs.items() if value.dtype]


def replayed_error(
    call: Call,
    inputs: Mapping[str, Value],
    outputs: Mapping[str, Value],
    parameters: Mapping[str, Value] | None = None,
) -> float:
    """Return the largest error of recorded results in units of rounding, relative to a bound of BOUND.

    call: the function and its plain arguments, or the layer and its settings. inputs, outputs, parameters: the
    recorded tensors of one side, by place. NotReplayableError says why there is none.
    """
    return _error(_recorded(call, inputs, outputs, parameters or {}), "result")


def _gradient_error(call: Call, forward: Call, backward: Call) -> float:
    """Return the largest error of the gradients of a side. call: the function. forward, backward: of the side."""
    tensors = [value for value in forward.inputs.values() if value.dtype]
    given = [*backward.inputs.values(), *backward.outputs.values()]
    if any(value.dtype and not value.has_values for value in given):
        raise NotReplayableError("no recorded values")
    found = _recorded(call, forward.inputs, forward.outputs, {})
    received = [_loaded(backward.inputs, index) for index in range(len(found.results))]
    passed = [_loaded(backward.outputs, index) for index, value in enumerate(tensors) if value.floating]
    return _error(replace(found, received=received, passed=passed), "gradient")


def _loaded(values: Mapping[str, Value], place: int) -> Tensor | None:
    value = values.get(str(place))
    return load(value) if value is not None and value.dtype else None


def _recorded(
    call: Call, inputs: Mapping[str, Value], outputs: Mapping[str, Value], parameters: Mapping[str, Value]
) -> RecordedCall:
    weights = {place: value for place, value in parameters.items() if value.dtype}
    used = [*weights.values(), *(value for value in inputs.values() if value.dtype)]
    results = [value for value in outputs.values() if value.dtype]
    floating = any(value.floating for value in results)
    if not used or not floating or any(not value.has_values for value in (*used, *results)):
        raise NotReplayableError("no recorded values")
    if sum(value.count for value in (*used, *results)) > LARGEST:
        raise NotReplayableError("large")
    return RecordedCall(
        str(call.settings.get("class")) if call.is_module else call.path,
        call.raw,
        {place: load(value) for place, value in inputs.items() if value.dtype},
        [load(value) for value in results],
        call.settings if call.is_module else None,
        {place: load(value) for place, value in weights.items()},
    )


def _error(call: RecordedCall, part: str) -> float:
    found = [error for error in replay(call) if error.why == RANDOM or error.part.startswith(part)]
    if not found or any(error.why == RANDOM for error in found):
        raise NotReplayableError(RANDOM if found else "no gradient")
    return max(error.units * BOUND / error.bound for error in found)
