"""Join micro-batches: a model that is called k times on parts of the batch of one call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from numerics.compare.join.calls import SIDES, Group, Place, identity, join_calls, without
from numerics.compare.table.step_record import Call, StepRecord


def join_micro_batches(target: StepRecord, golden: StepRecord) -> tuple[StepRecord, StepRecord, list[str]]:
    """Join the calls of micro-batches where the sides have other numbers of them. Returns notes as well."""
    has_modules = any(call.is_module for record in (target, golden) for call in record.calls.values())
    counts = _batches(target, golden) if has_modules else _batches_of_functions(target, golden)
    if counts is None:
        return target, golden, []
    shared = math.gcd(*counts)
    sizes = [count // shared for count in counts]
    here = _micro_batches(target, counts[0], sizes[0], golden if sizes[1] == 1 else None)
    there = _micro_batches(golden, counts[1], sizes[1], target if sizes[0] == 1 else None)
    joined, dropped = join_calls(target, here)
    others, more = join_calls(golden, there)
    dropped |= more
    if 1 not in sizes:
        dropped |= _repeated(joined, others)
    for record, other in ((joined, others), (others, joined)):
        dropped |= _outside(record) if has_modules else _of_loss(record) | _uneven(record, other)
    left = "outside the modules, such as the loss," if has_modules else "after the model, such as the loss,"
    note = (
        f"{counts[0]} micro-batches against {counts[1]}: their calls are joined. Checksums of joined values are "
        f"unknown, their statistics or values are compared. Functions {left} are not"
    )
    return without(joined, dropped), without(others, dropped), [note]


def _repeated(target: StepRecord, golden: StepRecord) -> set[Place]:
    """Return the values that are alike in all micro-batches of both sides and have the size of one, as masks have."""
    return {
        place
        for call in target.calls.values()
        for place in _places(call)
        if (other := golden.calls.get(call.name)) is not None
        and (here := getattr(call, place[1])[place[2]]).dtype
        and (there := getattr(other, place[1]).get(place[2])) is not None
        and not (here.parts or there.parts)
        and here.shape != there.shape
    }


def _outside(record: StepRecord) -> set[Place]:
    """Return every value of the functions outside all modules: a loss depends on the size of a batch."""
    return {
        place
        for call in record.calls.values()
        if not call.is_module and record.within(call.name) is None
        for place in _places(call)
    }


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


def _batches_of_functions(target: StepRecord, golden: StepRecord) -> tuple[int, int] | None:
    """Return how often each side uses a parameter, where it is with parts of the same batch.

    A parameter that is used several times in one forward is counted as often: the smallest count is taken.
    """
    sides = [_uses(record) for record in (target, golden)]
    counts = {
        (len(mine), len(others))
        for use, mine in sides[0].items()
        if (others := sides[1].get(use)) and _rows(mine) == _rows(others) > 0
    }
    found = min(counts, default=(1, 1))
    return found if found[0] != found[1] else None


def _uses(record: StepRecord) -> dict[Hashable, list[Call]]:
    """Return the forward calls with the same function and parameters, in their order."""
    found: dict[Hashable, list[Call]] = {}
    for call in record.calls.values():
        parameters = tuple(
            (value.shape, value.statistics) for value in call.inputs.values() if value.is_parameter
        )
        if parameters and not call.backward:
            found.setdefault((call.path, parameters), []).append(call)
    return found


def _of_loss(record: StepRecord) -> set[Place]:
    """Return every value of the functions after the last one with a new parameter, except those with a parameter."""
    known: set[Hashable] = set()
    names: set[str] = set()
    for call in record.calls.values():
        parameters = {(value.shape, value.statistics) for value in call.inputs.values() if value.is_parameter}
        if not call.backward and not parameters <= known:
            known |= parameters
            names.clear()
        elif not call.backward and not parameters:
            names.add(call.name)
    return {place for call in record.calls.values() if call.forward_name in names for place in _places(call)}


def _uneven(record: StepRecord, other: StepRecord) -> set[Place]:
    """Return every value of the functions that one side calls more often for the same batch."""
    one, two = (
        Counter(call.path for call in side.calls.values() if not call.backward) for side in (record, other)
    )
    return {
        place for call in record.calls.values() if one[call.path] != two[call.path] for place in _places(call)
    }


def _places(call: Call) -> Iterator[Place]:
    for side in SIDES:
        for place in getattr(call, side):
            yield call.name, side, place


def _rows(calls: Sequence[Call]) -> int:
    first = [
        next((value for value in call.inputs.values() if value.dtype and not value.is_parameter), None)
        for call in calls
    ]
    return sum(value.shape[0] for value in first if value is not None and value.shape)


def _micro_batches(record: StepRecord, count: int, size: int, other: StepRecord | None) -> list[Group]:
    """Group each label's calls of `size` micro-batches out of `count`. other: has one call for each group."""
    labels: dict[tuple[str, str, bool], list[Call]] = {}
    for call in record.calls.values():
        labels.setdefault((call.path, call.type, call.backward), []).append(call)
    groups = []
    known = {identity(call): call for call in other.calls.values()} if other else {}
    numbers = {key: max(call.number for call in calls) + 1 for key, calls in labels.items() if not key[2]}
    for (path, kind, backward), calls in labels.items():
        each, rest = divmod(numbers.get((path, kind, False), 0), count)
        if size == 1 or rest or not each:
            continue
        parts: dict[int, list[Call]] = {}
        for call in sorted(calls, key=lambda call: call.number):
            batch, index = divmod(call.number, each)
            parts.setdefault(batch // size * each + index, []).append(call)
        for number, members in parts.items():
            name = _renumbered(members[0], number)
            groups.append(Group(name, number, members, known.get((path, number, backward))))
    return groups


def _renumbered(call: Call, number: int) -> str:
    way = "backward" if call.backward else "forward"
    if call.is_module:
        return f"{call.name.rpartition('.')[0]}.{number}"
    return f"{call.path}.{number}.{way}"
