"""Join merged layers: one linear layer against several beside each other, such as qkv against q, k and v."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numerics.compare.join.calls import Group, axis_of, identity, join_calls
from numerics.compare.table.step_record import Call, StepRecord


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
    for first in range(len(beside)):
        for last in range(first + 2, len(beside) + 1):
            parts = beside[first:last]
            if all(_fits(parts, whole, side) for side in ("parameters", "outputs")):
                return parts
    return []


def _fits(parts: Sequence[Call], whole: Call, side: str) -> bool:
    return all(
        value.shape and axis_of([getattr(part, side).get(place) for part in parts], value.shape) is not None
        for place, value in getattr(whole, side).items()
        if value.dtype
    )
