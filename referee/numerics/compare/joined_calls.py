"""Join calls of one record that the other record has as one call: micro-batches of a batch, and layers alongside.

Tensors are concatenated, gradients of what the parts share are added. The statistics of a joined tensor follow from
those of its parts, its checksum does not. A value that cannot be joined is compared on neither side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from referee.numerics.record.read_record import Call, StepRecord, Value

JOINED_SIDES = ("input", "parameter", "output", "gradient")
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
        rest = {(*size[:axis], *size[axis + 1 :]) for size in (*shapes, shape)}
        if len(rest) == 1 and sum(size[axis] for size in shapes) == shape[axis]:
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
    parents: dict[str, str | None] = {}
    for name, outer in record.parents.items():
        parents.setdefault(names.get(name, name), names.get(outer, outer) if outer else None)
    renamed = names | {old: names.get(new, new) for old, new in record.renamed.items()}
    return replace(record, calls=calls, parents=parents, renamed=renamed), dropped


def _shared(group: Group, record: StepRecord) -> set[tuple[str, str]]:
    """Return side and place of the gradients of values that all calls of the group share: weights, positions."""
    forwards = [record.calls.get(call.forward_name) for call in group.calls]
    found: set[tuple[str, str]] = set()
    if not group.calls[0].backward:
        return found
    for side, of in (("output", "input"), ("input", "output")):
        tensors = [[value for value in call.sides[of].values() if value.dtype] for call in forwards if call]
        if len(tensors) == len(forwards) and len(set(map(len, tensors))) == 1:
            alike = [all(same(value, values[0]) for value in values) for values in zip(*tensors, strict=True)]
            found |= {(side, str(place)) for place, equal in enumerate(alike) if equal}
    return found


def _joined(group: Group, shared: set[tuple[str, str]], dropped: set[Place]) -> Call:
    first = group.calls[0]
    sides: dict[str, dict[str, Value]] = {"buffer": {}}
    for side in JOINED_SIDES:
        sides[side] = {}
        for place in dict.fromkeys(place for call in group.calls for place in call.sides[side]):
            values = [value for call in group.calls if (value := call.sides[side].get(place)) is not None]
            other = group.reference.sides[side].get(place) if group.reference else None
            if other is None and (side, place) in shared:
                other = values[0]  # of the same shape
            found = _value(values, other, first.backward and side != "gradient")
            if found is None or (len(values) < len(group.calls) and side != "gradient"):
                dropped.add((group.name, side, place))
            else:
                sides[side][place] = found
    return replace(first.with_sides(sides), name=group.name, number=group.number)


def _value(values: Sequence[Value], other: Value | None, add: bool) -> Value | None:
    """Join the values of a place; None where that is impossible. other: the value of the other record."""
    first = values[0]
    if not first.dtype:
        return first if all(value.plain == first.plain for value in values) else None
    shape = other.shape if other is not None else None
    if all(same(value, first) for value in values) and shape in (None, first.shape):
        return first
    if first.shape == shape:
        return total(values) if add else None
    axis = axis_of(values, shape) if shape is not None else 0
    if axis is None or not first.shape:
        return None
    return concatenated(values, axis)


def same(one: Value, other: Value) -> bool:
    """Return whether two recorded values are equal, as far as statistics and checksums show."""
    return (one.shape, one.statistics, one.checksum) == (other.shape, other.statistics, other.checksum)


def total(values: Sequence[Value]) -> Value:
    """Return the sum of the values. Of its statistics, the mean is known."""
    means = [value.mean for value in values if value.mean is not None]
    mean = sum(means) if len(means) == len(values) else None
    return Value(values[0].kind, values[0].dtype, values[0].shape, mean=mean, parts=tuple(values))


def concatenated(values: Sequence[Value], axis: int) -> Value:
    """Return the values as one along an axis, with the statistics that follow from theirs."""
    first = values[0]
    shape = (*first.shape[:axis], sum(value.shape[axis] for value in values), *first.shape[axis + 1 :])
    count = sum(value.count for value in values)

    def over(name: str, combine: Callable[[list[Any]], Any]) -> Any:
        numbers = [getattr(value, name) for value in values]
        return None if None in numbers else combine(numbers)

    def mean(numbers: list[float]) -> float:
        return sum(x * value.count for x, value in zip(numbers, values, strict=True)) / max(count, 1)

    return replace(
        first,
        shape=shape,
        highest=over("highest", lambda numbers: float(np.max(numbers))),  # NaN where one of them is
        lowest=over("lowest", lambda numbers: float(np.min(numbers))),
        mean=over("mean", mean),
        norm=over("norm", lambda numbers: math.hypot(*numbers)),
        nan_count=over("nan_count", sum),
        inf_count=over("inf_count", sum),
        checksum="",
        any_order="",
        file=None,
        parts=tuple(values),
        axis=axis,
    )


def without(record: StepRecord, dropped: set[Place]) -> StepRecord:
    """Remove the values that the other side could not join."""
    calls = {}
    for name, call in record.calls.items():
        sides = {
            side: {place: value for place, value in values.items() if (name, side, place) not in dropped}
            for side, values in call.sides.items()
        }
        calls[name] = call.with_sides(sides)
    return replace(record, calls=calls)


# -- micro-batches: a model that is called k times on parts of the batch of one call


def join_micro_batches(target: StepRecord, golden: StepRecord) -> tuple[StepRecord, StepRecord, list[str]]:
    """Join the calls of micro-batches where the sides have other numbers of them. Returns notes as well."""
    counts = _batches(target, golden)
    if counts is None:
        return target, golden, []
    shared = math.gcd(*counts)
    sizes = [count // shared for count in counts]
    joined, dropped = join_calls(target, _micro_batches(target, counts[0], sizes[0]))
    others, more = join_calls(golden, _micro_batches(golden, counts[1], sizes[1]))
    dropped |= more | _repeated(joined, others) | _outside(joined) | _outside(others)
    note = (
        f"{counts[0]} micro-batches against {counts[1]}: their calls are joined. Checksums of joined values are "
        "unknown, their statistics or values are compared. Functions outside the modules, such as the loss, are not"
    )
    return without(joined, dropped), without(others, dropped), [note]


def _repeated(target: StepRecord, golden: StepRecord) -> set[Place]:
    """Return the values that are alike in all micro-batches and have the size of one, as masks have."""
    return {
        (name, side, place)
        for name, side, place, value in _values(target.calls.values())
        if value.dtype
        and (other := golden.calls.get(name))
        and (there := other.sides[side].get(place)) is not None
        and not (value.parts or there.parts)
        and value.shape != there.shape
    }


def _outside(record: StepRecord) -> set[Place]:
    """Return every value of the functions outside all modules: a loss depends on the size of a batch."""
    calls = record.calls.values()
    outside = (call for call in calls if not call.is_module and record.within(call.name) is None)
    return {(name, side, place) for name, side, place, _ in _values(outside)}


def _values(calls: Iterable[Call]) -> Iterator[tuple[str, str, str, Value]]:
    for call in calls:
        for side in JOINED_SIDES:
            for place, value in call.sides[side].items():
                yield call.name, side, place, value


def _batches(target: StepRecord, golden: StepRecord) -> tuple[int, int] | None:
    """Return how often each side calls the model, where it is on parts of the same batch."""
    sides = []
    for record in (target, golden):
        found: dict[str, list[Call]] = {}
        for call in record.calls.values():
            if call.is_module and not call.backward and record.within(call.name) is None:
                found.setdefault(call.path, []).append(call)
        sides.append(found)
    for path, mine in sides[0].items():
        others = sides[1].get(path, [])
        if others and len(mine) != len(others) and _rows(mine) == _rows(others) > 0:
            return len(mine), len(others)
    return None


def _rows(calls: Sequence[Call]) -> int:
    first = [
        next((value for value in call.inputs.values() if value.dtype and not value.is_parameter), None)
        for call in calls
    ]
    return sum(value.shape[0] for value in first if value is not None and value.shape)


def _micro_batches(record: StepRecord, count: int, size: int) -> list[Group]:
    """Group each label's calls of `size` micro-batches out of `count`."""
    labels: dict[tuple[str, str, bool], list[Call]] = {}
    for call in record.calls.values():
        labels.setdefault((call.path, call.type, call.backward), []).append(call)
    groups = []
    numbers = {key: max(call.number for call in calls) + 1 for key, calls in labels.items() if not key[2]}
    for (path, kind, _), calls in labels.items():
        each, rest = divmod(numbers.get((path, kind, False), 0), count)
        if size == 1 or rest or not each:
            continue
        parts: dict[int, list[Call]] = {}
        for call in sorted(calls, key=lambda call: call.number):
            batch, index = divmod(call.number, each)
            parts.setdefault(batch // size * each + index, []).append(call)
        for number, members in parts.items():
            name = _renumbered(members[0], number)
            groups.append(Group(name, number, members))
    return groups


def _renumbered(call: Call, number: int) -> str:
    way = "backward" if call.backward else "forward"
    if call.is_module:
        return f"{call.name.rpartition('.')[0]}.{number}"
    return f"{call.path}.{number}.{way}"


# -- merged layers: one linear layer against several alongside, such as qkv against q, k and v


def join_merged_layers(
    target: StepRecord, golden: StepRecord, names: Mapping[str, Any]
) -> tuple[StepRecord, StepRecord, list[str], dict[str, str]]:
    """Join layers beside each other that the other side has as one layer.

    names: the map of names; an entry {name: [names]}, or several target names with the same golden name, says which.
    Returns notes and the map that is left.
    """
    plain = {name: other for name, other in names.items() if isinstance(other, str)}
    lists: dict[str, list[str]] = {}
    for name, other in plain.items():
        lists.setdefault(other, []).append(name)
    of_target = {other: parts for other, parts in lists.items() if len(parts) > 1}
    of_golden = {name: list(other) for name, other in names.items() if not isinstance(other, str)}
    target, one = _merge(target, golden, of_target)
    golden, two = _merge(golden, target, of_golden)
    left = {name: other for name, other in plain.items() if other not in of_target}
    return target, golden, [f"target: {note}" for note in one] + [f"golden: {note}" for note in two], left


def _merge(
    record: StepRecord, other: StepRecord, given: Mapping[str, Sequence[str]]
) -> tuple[StepRecord, list[str]]:
    paths = {call.path for call in record.calls.values() if call.is_module}
    merged = [
        call
        for call in other.calls.values()
        if call.is_module and not call.backward and call.parameters and call.path not in paths
    ]
    here = {identity(call): call for call in record.calls.values() if call.is_module}
    groups, notes = [], []
    for whole in merged:
        parts = [here.get((path, whole.number, False)) for path in given.get(whole.path, ())]
        found = [part for part in parts if part is not None] or _parts(whole, record, other)
        if not found:
            continue
        names = ", ".join(part.path for part in found)
        notes.append(f"{names} are joined and compared with {whole.path}")
        groups += _group(whole, found, record, other)
        backward = [here.get((part.path, part.number, True)) for part in found]
        back = next(
            (call for call in other.calls.values() if call.backward and call.forward_name == whole.name), None
        )
        if back is not None and all(backward):
            groups += _group(back, [call for call in backward if call is not None], record, other)
    joined, _ = join_calls(record, groups)
    return joined, list(dict.fromkeys(notes))


def _group(whole: Call, parts: list[Call], record: StepRecord, other: StepRecord) -> list[Group]:
    """Return the group of a layer, and those of the functions within."""
    groups = [Group(whole.name, whole.number, parts, whole)]
    inner = [_inside(part, record) for part in parts]
    outer = _inside(whole, other)
    if len({tuple(call.path for call in calls) for calls in (*inner, outer)}) == 1:
        groups += [
            Group(calls[0].name, calls[0].number, list(calls[:-1]), calls[-1])
            for calls in zip(*inner, outer, strict=True)
        ]
    return groups


def _inside(call: Call, record: StepRecord) -> list[Call]:
    return [other for other in record.calls.values() if record.within(other.name) == call.name]


def _parts(whole: Call, record: StepRecord, other: StepRecord) -> list[Call]:
    """Find consecutive layers of the same module whose results and weights together have the shapes of one layer's."""
    place = whole.path.rpartition(".")[0]
    known = {call.path for call in other.calls.values() if call.is_module}
    beside = [
        call
        for call in record.calls.values()
        if call.is_module
        and not call.backward
        and call.parameters.keys() == whole.parameters.keys()
        and call.number == whole.number
        and call.path.rpartition(".")[0] == place
        and call.path not in known
    ]
    ends = itertools.combinations(range(len(beside) + 1), 2)
    several = (beside[first:last] for first, last in ends if last - first > 1)
    fits = (parts for parts in several if all(_fits(parts, whole, side) for side in ("parameter", "output")))
    return next(fits, [])


def _fits(parts: Sequence[Call], whole: Call, side: str) -> bool:
    return all(
        value.shape and axis_of([part.sides[side].get(place) for part in parts], value.shape) is not None
        for place, value in whole.sides[side].items()
        if value.dtype
    )


# -- ranks that share the work of one


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
    sides: dict[str, dict[str, Value]] = {}
    for side in JOINED_SIDES:
        sides[side] = dict(members[0].sides[side])
        for place, whole in other.sides[side].items():
            if place in sides[side] and whole.dtype:
                values = [call.sides[side][place] for call in members if place in call.sides[side]]
                different = (value for value in values if not same(value, values[0]))
                found = _value(values, whole, add and side != "gradient")
                sides[side][place] = found or next(different, values[0])
    return members[0].with_sides(sides)
