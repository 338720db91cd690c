"""Join several calls of a record into one.

Tensors are concatenated, gradients of what the parts share are added. The statistics of a joined tensor follow from
those of its parts, its checksum does not. A value that cannot be joined is compared on neither side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numerics.compare.table.step_record import Call, StepRecord, Value

SIDES = ("inputs", "parameters", "outputs", "gradients")
Place = tuple[str, str, str]  # name of the call, side, place


@dataclass
class Group:
    """Calls that become one. name: of the joined call. reference: the other record's call."""

    name: str
    number: int
    calls: list[Call]
    reference: Call | None = None


def identity(call: Call) -> tuple[str, int, bool]:
    return call.path, call.number, call.backward


def axis_of(values: Sequence[Value | None], shape: Sequence[int]) -> int | None:
    """Return the axis along which the values together have the shape."""
    shapes = [value.shape for value in values if value is not None]
    if len(shapes) != len(values) or any(len(size) != len(shape) for size in shapes):
        return None
    for axis in range(len(shape)):
        rest = {size[:axis] + size[axis + 1 :] for size in shapes}
        if (
            rest == {(*shape[:axis], *shape[axis + 1 :])}
            and sum(size[axis] for size in shapes) == shape[axis]
        ):
            return axis
    return None


def join_calls(record: StepRecord, groups: Iterable[Group]) -> tuple[StepRecord, set[Place]]:
    """Replace the calls of each group by one. Returns the values that could not be joined as well."""
    names: dict[str, str] = {}
    joined: dict[str, Call] = {}
    dropped: set[Place] = set()
    for group in groups:
        names |= {call.name: group.name for call in group.calls}
        joined[group.name] = _joined(group, _shared(group, record), dropped)
    calls: dict[str, Call] = {}
    for name, call in record.calls.items():
        other = names.get(name, name)
        calls.setdefault(other, joined[other] if name in names else call)
    parents = {
        names.get(name, name): names.get(outer, outer) if outer is not None else None
        for name, outer in reversed(record.parents.items())
    }
    return replace(record, calls=calls, parents=dict(reversed(parents.items()))), dropped


def _shared(group: Group, record: StepRecord) -> set[tuple[str, str]]:
    """Return side and place of the gradients of values that all calls of the group share: weights, positions."""
    forwards = [record.calls.get(call.forward_name) for call in group.calls]
    found: set[tuple[str, str]] = set()
    if not group.calls[0].backward or None in forwards:
        return found
    for side, of in (("outputs", "inputs"), ("inputs", "outputs")):
        tensors = [[value for value in getattr(call, of).values() if value.dtype] for call in forwards]
        if len({len(values) for values in tensors}) == 1:
            parts = enumerate(zip(*tensors, strict=True))
            found |= {
                (side, str(place))
                for place, values in parts
                if all(_same(value, values[0]) for value in values)
            }
    return found


def _joined(group: Group, shared: set[tuple[str, str]], dropped: set[Place]) -> Call:
    first = group.calls[0]
    sides: dict[str, Any] = {}
    for side in SIDES:
        sides[side] = {}
        for place in dict.fromkeys(place for call in group.calls for place in getattr(call, side)):
            values = [value for call in group.calls if (value := getattr(call, side).get(place)) is not None]
            other = getattr(group.reference, side).get(place) if group.reference else None
            if other is None and (side, place) in shared:
                other = values[0]  # of the same shape
            found = _value(values, other, first.backward and side != "gradients")
            if found is None or (len(values) < len(group.calls) and side != "gradients"):
                dropped.add((group.name, side, place))
            else:
                sides[side][place] = found
    return replace(first, name=group.name, number=group.number, **sides)


def _value(values: Sequence[Value], other: Value | None, add: bool) -> Value | None:
    """Join the values of a place; None where that is impossible. other: the value of the other record."""
    first = values[0]
    if not first.dtype:
        if all(value.plain == first.plain for value in values):
            return first
        return other if other is not None and _sums(values, other) else None
    if first.count == 1 and not (other is not None and all(_same(value, other) for value in values)):
        return None  # such as a loss, which may be a mean or a sum
    shape = other.shape if other is not None else None
    if all(_same(value, first) for value in values) and shape in (None, first.shape):
        return first
    if first.shape == shape:
        return (
            _total(values) if add and all(value.has_values for value in values) and first.count > 1 else None
        )
    axis = axis_of(values, shape) if shape is not None else 0
    if axis is None or not first.shape:
        return None
    return _concatenated(values, axis)


def _sums(values: Sequence[Value], other: Value) -> bool:
    """Return whether the other value is the sum of the plain ones, as a batch size is."""
    plain = [value.plain for value in values]
    return all(type(number) is int for number in (*plain, other.plain)) and sum(plain) == other.plain


def _same(one: Value, other: Value) -> bool:
    return (one.shape, one.statistics, one.checksum) == (other.shape, other.statistics, other.checksum)


def _total(values: Sequence[Value]) -> Value:
    return Value(values[0].kind, values[0].dtype, values[0].shape, parts=tuple(values))


def _concatenated(values: Sequence[Value], axis: int) -> Value:
    first = values[0]
    shape = (*first.shape[:axis], sum(value.shape[axis] for value in values), *first.shape[axis + 1 :])
    count = sum(value.count for value in values)

    def over(name: str, combine: Callable[[list[Any]], Any]) -> Any:
        numbers = [getattr(value, name) for value in values]
        return None if any(number is None for number in numbers) else combine(numbers)

    def mean(numbers: list[float]) -> float:
        return math.fsum(x * value.count for x, value in zip(numbers, values, strict=True)) / max(count, 1)

    return replace(
        first,
        shape=shape,
        highest=over("highest", lambda numbers: _extreme(max, numbers)),
        lowest=over("lowest", lambda numbers: _extreme(min, numbers)),
        mean=over("mean", mean) if all(map(_finite, values)) else over("mean", sum),
        norm=over("norm", lambda numbers: math.hypot(*numbers)),
        nan_count=over("nan_count", sum),
        inf_count=over("inf_count", sum),
        checksum="",
        file=None,
        parts=tuple(values),
        axis=axis,
    )


def _finite(value: Value) -> bool:
    return value.mean is None or math.isfinite(value.mean)


def _extreme(of: Callable[[list[float]], float], numbers: list[float]) -> float:
    return math.nan if any(map(math.isnan, numbers)) else of(numbers)


def without(record: StepRecord, dropped: set[Place]) -> StepRecord:
    """Remove the values that the other side could not join."""
    places: dict[str, list[tuple[str, str]]] = {}
    for name, side, place in dropped:
        places.setdefault(name, []).append((side, place))
    calls = dict(record.calls)
    for name, listed in places.items():
        if name in calls:
            sides: dict[str, Any] = {side: dict(getattr(calls[name], side)) for side in SIDES}
            for side, place in listed:
                sides[side].pop(place, None)
            calls[name] = replace(calls[name], **sides)
    return replace(record, calls=calls)
