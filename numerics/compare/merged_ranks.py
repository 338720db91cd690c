"""Merge the ranks of tensor parallelism into one record, as the shapes of the other record say.

equal on all ranks  one value
shards              concatenated along the axis on which they together have the golden shape
partial sums        added: what a call with sharded parameters computes, and every gradient that backward passes on.
                    Where values were not recorded, the mean of the sum is compared alone
other values        must be equal, as gradients of parameters: the first that differs from rank 0's stands for them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from numerics.compare.joined_calls import SIDES, axis_of, concatenated, identity, same, total
from numerics.compare.step_record import Call, StepRecord, Value


def merge_ranks(ranks: Sequence[StepRecord], golden: StepRecord) -> StepRecord:
    """Return one record of all ranks. golden: of one process."""
    first, sharded, calls = ranks[0], set[str](), {}
    others = {identity(call): call for call in golden.calls.values()}  # whatever the class of a sharded layer
    for name, call in first.calls.items():
        whole = others.get(identity(call))
        if whole is not None and _is_sharded(call, whole):
            sharded |= {name, *first.around(name)}
    for name, call in first.calls.items():
        members = [rank.calls[name] for rank in ranks if name in rank.calls]
        calls[name] = _merged(members, others.get(identity(call)), call.backward or name in sharded)
    lacking = [text for rank in ranks for text in rank.incomplete]
    values = [value for call in calls.values() for value in call.values]
    if sums := sum(bool(one.parts) and one.axis is None and not one.has_values for one in values):
        text = f"{sums} partial sums of ranks are compared by their mean alone"
        lacking.append(f'{text}; fix: record with "task": "tensor"')
    return replace(first, calls=calls, incomplete=list(dict.fromkeys(lacking)))


def _is_sharded(call: Call, other: Call) -> bool:
    """Return whether a forward computes with a part of a parameter."""
    mine, whole = ({**one.inputs, **one.parameters} for one in (call, other))
    parameters = [place for place, value in whole.items() if value.is_parameter or place in other.parameters]
    return any(place in mine and mine[place].shape != whole[place].shape for place in parameters)


def _merged(members: Sequence[Call], other: Call | None, add: bool) -> Call:
    if other is None:
        return members[0]
    sides: dict[str, Any] = {side: {} for side in SIDES}
    for side in SIDES:
        for place in getattr(members[0], side):
            values = [getattr(call, side)[place] for call in members if place in getattr(call, side)]
            whole = getattr(other, side).get(place)
            sides[side][place] = _value(values, whole, add and side != "gradients")
    return replace(members[0], **sides)


def _value(values: Sequence[Value], whole: Value | None, add: bool) -> Value:
    different = next((value for value in values if not same(value, values[0])), None)
    if whole is None or not whole.dtype or (different is None and values[0].shape == whole.shape):
        return values[0]
    if different is None or values[0].shape != whole.shape:
        axis = axis_of(values, whole.shape)
        return values[0] if axis is None else concatenated(values, axis)
    return total(values) if add else different
