"""Replay a recorded function or layer in float64 on its recorded inputs, and measure its result."""

from __future__ import annotations

from collections.abc import Mapping

from numerics.compare.table.measure import load
from numerics.compare.table.step_record import Call, Value
from numerics.rounding.replayed_calls import LARGEST, NotReplayableError, RecordedCall, replay
from numerics.rounding.within_rounding import BOUND, RANDOM


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
    if call.backward:
        raise NotReplayableError("backward is judged side by side")
    weights = {place: value for place, value in (parameters or {}).items() if value.dtype}
    used = [*weights.values(), *(value for value in inputs.values() if value.dtype)]
    results = [value for value in outputs.values() if value.dtype]
    floating = any(value.floating for value in results)
    if not used or not floating or any(not value.has_values for value in (*used, *results)):
        raise NotReplayableError("no recorded values")
    if sum(value.count for value in (*used, *results)) > LARGEST:
        raise NotReplayableError("large")
    found = replay(
        RecordedCall(
            str(call.settings.get("class")) if call.is_module else call.path,
            call.raw,
            {place: load(value) for place, value in inputs.items() if value.dtype},
            [load(value) for value in results],
            call.settings if call.is_module else None,
            {place: load(value) for place, value in weights.items()},
        )
    )
    if any(error.why == RANDOM for error in found):
        raise NotReplayableError(RANDOM)
    return max(error.units * BOUND / error.bound for error in found)
