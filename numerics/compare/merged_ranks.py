"""Merge the ranks of tensor parallelism into one record, as the shapes of the other record say.

A value that is equal on all ranks is one. Shards are concatenated along the axis on which they together have the golden
shape. Other values of a call with sharded parameters are partial sums: added where values were recorded, else not
compared. Without sharded parameters, ranks must be equal: the first one that differs from rank 0 stands for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from numerics.compare.joined_calls import SIDES, Place, axis_of, concatenated, same, total
from numerics.compare.step_record import Call, StepRecord, Value


def merge_ranks(ranks: Sequence[StepRecord], golden: StepRecord) -> tuple[StepRecord, set[Place]]:
    """Return one record of all ranks, and the values that cannot be compared. golden: of one process."""
    first, dropped = ranks[0], set[Place]()
    sharded = {
        name
        for name, call in first.calls.items()
        if name in golden.calls and _is_sharded(call, golden.calls[name])
    }
    calls = {}
    for name, call in first.calls.items():
        other = golden.calls.get(name)
        members = [rank.calls[name] for rank in ranks if name in rank.calls]
        calls[name] = (
            call if other is None else _merged(members, other, call.forward_name in sharded, dropped)
        )
    lacking = [text for rank in ranks for text in rank.incomplete]
    if dropped:
        lacking.append(
            f'{len(dropped)} partial sums of ranks are not compared; fix: record with "task": "tensor"'
        )
    return replace(first, calls=calls, incomplete=list(dict.fromkeys(lacking))), dropped


def _is_sharded(call: Call, other: Call) -> bool:
    """Return whether a forward computes with a part of a parameter."""
    mine, whole = ({**one.parameters, **one.inputs} for one in (call, other))
    parameters = {
        **other.parameters,
        **{place: one for place, one in other.inputs.items() if one.is_parameter},
    }
    return any(place in mine and mine[place].shape != whole[place].shape for place in parameters)


def _merged(members: Sequence[Call], other: Call, sharded: bool, dropped: set[Place]) -> Call:
    sides: dict[str, Any] = {side: {} for side in SIDES}
    for side in SIDES:
        for place in getattr(members[0], side):
            values = [getattr(call, side)[place] for call in members if place in getattr(call, side)]
            found = _value(values, getattr(other, side).get(place), sharded)
            if found is None:
                dropped.add((other.name, side, place))
            else:
                sides[side][place] = found
    return replace(members[0], **sides)


def _value(values: Sequence[Value], other: Value | None, sharded: bool) -> Value | None:
    different = next((value for value in values if not same(value, values[0])), None)
    if other is None or not other.dtype or (different is None and values[0].shape == other.shape):
        return values[0]
    if values[0].shape != other.shape:
        axis = axis_of(values, other.shape)
        return values[0] if axis is None else concatenated(values, axis)
    if not sharded:
        return different
    return total(values) if all(value.has_values for value in values) else None
