"""Match the calls of two records: by name, by module path whatever the class, by order, by a map of names."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, TypeVar

from referee.errors import NumericsError
from referee.numerics.record.read_record import Call, StepRecord
from referee.numerics.text_files import read_dump_json

NameMap = Mapping[str, str | Sequence[str]]
Pair = tuple[Call | None, Call | None]  # of the target and of the golden record; None where a side has none


def read_map(path: Path) -> NameMap:
    """Read a map of names, {target: golden}: module paths, or names of rows. A list names the parts of a layer."""
    content = read_dump_json(path, "correct it")
    if not isinstance(content, dict) or not all(map(_is_name, content.values())):
        raise NumericsError(f'{path} is not a name map; fix: write {{"target name": "golden name"}}')
    return content


def _is_name(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) for name in names)


def unwrap(record: StepRecord, other: StepRecord) -> StepRecord:
    """Return the record with the paths of the other one, where a module around the model adds a prefix."""
    mine, others = (
        {call.path: call.type for call in side.calls.values() if call.is_module} for side in (record, other)
    )
    if "" not in mine or "" not in others or mine[""] == others[""]:
        return record
    for prefix in sorted(filter(None, mine), key=len):
        inner = {
            path.removeprefix(prefix).lstrip(".") for path in mine if f"{path}.".startswith(f"{prefix}.")
        }
        if mine[prefix] == others[""] and 2 * len(inner & others.keys()) >= len(others):
            calls = {
                name: replace(call, path=_without(call.path, prefix)) if call.is_module else call
                for name, call in record.calls.items()
            }
            return replace(record, calls=calls)
    return record


def _without(path: str, prefix: str) -> str:
    is_inside = f"{path}.".startswith(f"{prefix}.")
    return path.removeprefix(prefix).lstrip(".") if is_inside else f"around.{path}".rstrip(".")


def match_calls(target: StepRecord, golden: StepRecord, names: dict[str, str]) -> list[Pair]:
    """Return every call of both records once, in the order of execution; forward before backward."""
    return _Matching(target, golden, names).pairs()


def recorded_by_both(target: Call | None, golden: Call | None) -> Pair:
    """Return a pair with what both msProbe and referee.numerics.Recorder record of a function.

    msProbe sees arguments as the caller wrote them, by position or by name. Its backward of a function is that of the
    last autograd node, which may have other results: a linear layer's is the view of a product.
    """
    if target is None or golden is None or target.is_module:
        return target, golden
    both = target.inputs.keys() & golden.inputs.keys()

    def shared(call: Call) -> Call:
        inputs = {place: value for place, value in call.inputs.items() if place in both}
        return replace(call, inputs=inputs, outputs={} if call.backward else call.outputs)

    return shared(target), shared(golden)


Item = TypeVar("Item")


class _Matching:
    def __init__(self, target: StepRecord, golden: StepRecord, names: dict[str, str]) -> None:
        self.target, self.golden, self.names = target, golden, names
        self.paths = {name: other for name, other in names.items() if name not in target.calls}
        self.matched: dict[str, str] = {}  # target -> golden
        self.taken: set[str] = set()
        self.modules = _first_calls(target), _first_calls(golden)

    def pairs(self) -> list[Pair]:
        for name, other in self.names.items():
            if name in self.target.calls and other in self.golden.calls:
                self._add(name, other)
        self._shifted("", "")
        for backward in (False, True):
            if backward:
                self._backward_as_forward()
            self._modules(backward)
            self._functions(backward)
        return self._ordered()

    def _add(self, name: str, other: str) -> None:
        if name not in self.matched and other not in self.taken:
            self.matched[name] = other
            self.taken.add(other)

    def _free(self, record: StepRecord, backward: bool, modules: bool) -> list[Call]:
        used = self.matched if record is self.target else self.taken
        return [
            call
            for call in record.calls.values()
            if call.backward == backward and call.is_module == modules and call.name not in used
        ]

    def _path(self, path: str) -> str:
        """Return the golden path of a target's module."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            start = ".".join(parts[:length])
            if start in self.paths:
                return ".".join(filter(None, (self.paths[start], *parts[length:])))
        return path

    def _shifted(self, mine: str, other: str) -> None:
        """Find modules whose index in a list differs, by their class and weights. mine, other: what holds them."""
        nodes, others = (
            [(calls, path) for path in _children(calls, at)]
            for calls, at in zip(self.modules, (mine, other), strict=True)
        )
        names = [[(_last(path), _kind(calls, path)) for calls, path in side] for side in (nodes, others)]
        pairs = list(zip(nodes, others, strict=False))
        for (_, one), (_, two) in pairs if names[0] == names[1] else _align(nodes, others, (_weights,)):
            if _last(one) != _last(two):
                self.paths.setdefault(one, two)
            self._shifted(one, two)

    def _modules(self, backward: bool) -> None:
        groups: list[dict[str, list[Call]]] = [{}, {}]
        for paths, record in zip(groups, (self.target, self.golden), strict=True):
            for call in self._free(record, backward, True):
                paths.setdefault(call.path, []).append(call)
        for path in sorted(groups[0], key=lambda path: self._path(path) == path):  # a map before paths
            for call, other in _of_module(groups[0][path], groups[1].get(self._path(path), [])):
                self._add(call.name, other.name)
        mine, theirs = self._free(self.target, backward, True), self._free(self.golden, backward, True)
        for call, other in _align(mine, theirs, (_structure, lambda call: call.type)):
            self._add(call.name, other.name)
            self.paths.setdefault(call.path, other.path)

    def _functions(self, backward: bool) -> None:
        """Match functions within a module by inputs and order: a call more shifts the numbers of the others."""
        groups: dict[Hashable, tuple[list[Call], list[Call]]] = {}
        for side, record in enumerate((self.target, self.golden)):
            for call in self._free(record, backward, False):
                groups.setdefault(self._place(call, record), ([], []))[side].append(call)
        for mine, theirs in groups.values():
            for call, other in _align(mine, theirs, (_received, lambda call: call.path)):
                self._add(call.name, other.name)

    def _place(self, call: Call, record: StepRecord) -> Hashable:
        outer = record.within(call.name)
        if outer is None:
            return None
        paired = outer in (self.matched if record is self.target else self.taken)
        mixed = self.target.by_msprobe != self.golden.by_msprobe
        if mixed and not paired and record.within(outer) is None:
            return None  # the root, which msProbe does not record
        if record is self.target:
            return self.matched[outer] if paired else (outer,)
        return outer

    def _backward_as_forward(self) -> None:
        backward = {call.forward_name: call.name for call in self.golden.calls.values() if call.backward}
        for call in self.target.calls.values():
            other = self.matched.get(call.forward_name)
            if call.backward and other in backward:
                self._add(call.name, backward[other])

    def _ordered(self) -> list[Pair]:
        """Return the pairs in the golden order. A call of the target alone follows its neighbour there."""
        position = {name: (index, 0) for index, name in enumerate(self.golden.calls)}
        found: list[tuple[tuple[int, int], Pair]] = [
            (position[name], (None, call))
            for name, call in self.golden.calls.items()
            if name not in self.taken
        ]
        first_backward = sum(not call.backward for call in self.golden.calls.values())
        last = (-1, 0)
        for extra, (name, call) in enumerate(self.target.calls.items(), 1):
            if call.backward and last[0] < first_backward - 1:
                last = (first_backward - 1, 0)
            if name in self.matched:
                other = self.matched[name]
                last = position[other]
                found.append((last, (call, self.golden.calls[other])))
            else:
                found.append(((last[0], extra), (call, None)))
        return [pair for _, pair in sorted(found, key=lambda item: item[0])]


def _first_calls(record: StepRecord) -> dict[str, Call]:
    """Return the first forward of each module, by path."""
    found: dict[str, Call] = {}
    for call in record.calls.values():
        if call.is_module and not call.backward:
            found.setdefault(call.path, call)
    return found


def _children(calls: Mapping[str, Call], path: str) -> list[str]:
    """Return the paths directly within a path."""
    start = f"{path}." if path else ""
    inner = (other.removeprefix(start) for other in calls if other and other.startswith(start))
    return [f"{start}{name}" for name in dict.fromkeys(other.partition(".")[0] for other in inner)]


def _kind(calls: Mapping[str, Call], path: str) -> str:
    return calls[path].type if path in calls else ""


def _weights(node: tuple[Mapping[str, Call], str]) -> Hashable:
    """Return the class of a module, and what identifies the parameters within it."""
    calls, path = node
    return _kind(calls, path), *(
        (other.removeprefix(path), place, value.shape, value.statistics)
        for other, call in calls.items()
        if f"{other}.".startswith(f"{path}.")
        for place, value in call.parameters.items()
    )


def _of_module(mine: Sequence[Call], theirs: Sequence[Call]) -> list[tuple[Call, Call]]:
    """Pair the calls of a module by their numbers; by their inputs where one side calls it more often."""
    if len(mine) != len(theirs):
        return _align(mine, theirs, (_received, lambda call: call.type))
    numbers = {call.number: call for call in theirs}
    return [(call, numbers[call.number]) for call in mine if call.number in numbers]


def _received(call: Call) -> Hashable:
    inputs = ((value.shape, value.statistics, value.checksum) for value in call.inputs.values())
    trained = any(value.requires_grad for value in call.outputs.values())  # or under no_grad
    return call.type or call.path, trained, tuple(inputs)


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _structure(call: Call) -> Hashable:
    sides = (call.inputs, call.parameters, call.outputs)
    return call.type, tuple(value.shape for side in sides for value in side.values())


def _align(
    mine: Sequence[Item], theirs: Sequence[Item], signatures: Sequence[Callable[[Item], Hashable]]
) -> list[tuple[Item, Item]]:
    """Align two sequences by the first signature, and what is between the aligned items by the next."""
    if not mine or not theirs or not signatures:
        return []
    of = signatures[0]
    found: list[tuple[Item, Item]] = []
    here, there = 0, 0
    for block in SequenceMatcher(
        None, list(map(of, mine)), list(map(of, theirs)), autojunk=False
    ).get_matching_blocks():
        found += _align(mine[here : block.a], theirs[there : block.b], signatures[1:])
        here, there = block.a + block.size, block.b + block.size
        found += zip(mine[block.a : here], theirs[block.b : there], strict=True)
    return found
