"""Match the calls of two records: by name, by module path whatever the class, by order, by a map of names."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, TypeVar

from referee.errors import NumericsError
from referee.numerics.compare.joined_calls import SIDES, axis_of, concatenated, identity, same, total
from referee.numerics.compare.read_record import Call, StepRecord, Value
from referee.numerics.dump_files import read_json

NameMap = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class CallPair:
    """A call of the target and one of the golden record; None where a side has no such call.

    how: "name", "path" (another class), "order" (another number or name), "map", or "" where unmatched.
    """

    target: Call | None
    golden: Call | None
    how: str = ""

    @property
    def call(self) -> Call:
        """Return the golden call, else the target's."""
        found = self.golden or self.target
        assert found is not None
        return found


def read_map(path: Path) -> NameMap:
    """Read a map of names, {target: golden}: module paths, or names of rows. A list names the parts of a layer."""
    content = read_json(path, "correct it")
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


def match_calls(target: StepRecord, golden: StepRecord, names: dict[str, str]) -> list[CallPair]:
    """Return every call of both records once, in the order of execution; forward before backward."""
    return _Matching(target, golden, names).pairs()


def recorded_by_both(pair: CallPair) -> CallPair:
    """Return the pair with what both msProbe and referee.numerics.Recorder record of a function.

    msProbe sees arguments as the caller wrote them, by position or by name. Its backward of a function is that of the
    last autograd node, which may have other results: a linear layer's is the view of a product.
    """
    target, golden = pair.target, pair.golden
    if target is None or golden is None or target.is_module:
        return pair
    both = target.inputs.keys() & golden.inputs.keys()
    sides = [
        replace(
            call,
            inputs={place: value for place, value in call.inputs.items() if place in both},
            outputs={} if call.backward else call.outputs,
        )
        for call in (target, golden)
    ]
    return replace(pair, target=sides[0], golden=sides[1])


Item = TypeVar("Item")


class _Matching:
    def __init__(self, target: StepRecord, golden: StepRecord, names: dict[str, str]) -> None:
        self.target, self.golden, self.names = target, golden, names
        self.paths = {name: other for name, other in names.items() if name not in target.calls}
        self.matched: dict[str, tuple[str, str]] = {}  # target -> golden, how
        self.taken: set[str] = set()
        self.trees = _ModuleTree(target), _ModuleTree(golden)

    def pairs(self) -> list[CallPair]:
        for name, other in self.names.items():
            if name in self.target.calls and other in self.golden.calls:
                self._add(name, other, "map")
        self._shifted("", "")
        for backward in (False, True):
            if backward:
                self._backward_as_forward()
            self._modules(backward)
            self._functions(backward)
        return self._ordered()

    def _add(self, name: str, other: str, how: str) -> None:
        if name not in self.matched and other not in self.taken:
            self.matched[name] = other, how
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
        parts, others = (
            [(tree, path) for path in tree.children(at)]
            for tree, at in zip(self.trees, (mine, other), strict=True)
        )
        if list(map(_named, parts)) == list(map(_named, others)):
            pairs = list(zip(parts, others, strict=True))
        else:
            pairs = _align(parts, others, (_weights,))
        for (_, one), (_, two) in pairs:
            if _last(one) != _last(two):
                self.paths.setdefault(one, two)
            self._shifted(one, two)

    def _modules(self, backward: bool) -> None:
        calls: dict[str, list[Call]] = {}
        others: dict[str, list[Call]] = {}
        for call in self._free(self.target, backward, True):
            calls.setdefault(call.path, []).append(call)
        for call in self._free(self.golden, backward, True):
            others.setdefault(call.path, []).append(call)
        for path in sorted(calls, key=lambda path: self._path(path) == path):  # a map before paths
            other_path = self._path(path)
            for call, other in _of_module(calls[path], others.get(other_path, [])):
                how = "map" if path != other_path else "name" if other.name == call.name else "path"
                self._add(call.name, other.name, how)
        mine, theirs = self._free(self.target, backward, True), self._free(self.golden, backward, True)
        for call, other in _align(mine, theirs, (_structure, lambda call: call.type)):
            self._add(call.name, other.name, "order")
            self.paths.setdefault(call.path, other.path)

    def _functions(self, backward: bool) -> None:
        """Match functions within a module by inputs and order: a call more shifts the numbers of the others."""
        groups: dict[Hashable, tuple[list[Call], list[Call]]] = {}
        for side, record in enumerate((self.target, self.golden)):
            for call in self._free(record, backward, False):
                groups.setdefault(self._place(call, record), ([], []))[side].append(call)
        for mine, theirs in groups.values():
            for call, other in _align(mine, theirs, (_received, lambda call: call.path)):
                self._add(call.name, other.name, "name" if call.name == other.name else "order")

    def _place(self, call: Call, record: StepRecord) -> Hashable:
        outer = record.within(call.name)
        if outer is None:
            return None
        paired = outer in (self.matched if record is self.target else self.taken)
        mixed = self.target.by_msprobe != self.golden.by_msprobe
        if mixed and not paired and record.within(outer) is None:
            return None  # the root, which msProbe does not record
        if record is self.target:
            return self.matched[outer][0] if paired else (outer,)
        return outer

    def _backward_as_forward(self) -> None:
        forwards = {call.forward_name: call.name for call in self._free(self.golden, True, True)}
        forwards |= {call.forward_name: call.name for call in self._free(self.golden, True, False)}
        for call in self.target.calls.values():
            if call.backward and call.forward_name in self.matched:
                other, how = self.matched[call.forward_name]
                if other in forwards:
                    self._add(call.name, forwards[other], how)

    def _ordered(self) -> list[CallPair]:
        """Return the pairs in the golden order. A call of the target alone follows its neighbour there."""
        position = {name: (index, 0) for index, name in enumerate(self.golden.calls)}
        found = [
            (position[name], CallPair(None, call))
            for name, call in self.golden.calls.items()
            if name not in self.taken
        ]
        first_backward = sum(not call.backward for call in self.golden.calls.values())
        last = (-1, 0)
        for extra, (name, call) in enumerate(self.target.calls.items(), 1):
            if call.backward and last[0] < first_backward - 1:
                last = (first_backward - 1, 0)
            if name in self.matched:
                other, how = self.matched[name]
                last = position[other]
                found.append((last, CallPair(call, self.golden.calls[other], how)))
            else:
                found.append(((last[0], extra), CallPair(call, None)))
        return [pair for _, pair in sorted(found, key=lambda item: item[0])]


class _ModuleTree:
    """The modules of a record by their paths."""

    def __init__(self, record: StepRecord) -> None:
        self.first: dict[str, Call] = {}  # forward call of each path
        for call in record.calls.values():
            if call.is_module and not call.backward:
                self.first.setdefault(call.path, call)

    def children(self, path: str) -> list[str]:
        start = f"{path}." if path else ""
        names = (
            other.removeprefix(start).partition(".")[0]
            for other in self.first
            if other and other.startswith(start)
        )
        return [f"{start}{name}" for name in dict.fromkeys(names)]

    def kind(self, path: str) -> str:
        return self.first[path].type if path in self.first else ""

    def within(self, path: str) -> list[tuple[str, str, Value]]:
        return [
            (other.removeprefix(path), key, value)
            for other, call in self.first.items()
            if f"{other}.".startswith(f"{path}.")
            for key, value in call.parameters.items()
        ]


Node = tuple[_ModuleTree, str]  # a module, by its path


def _named(node: Node) -> Hashable:
    return _last(node[1]), node[0].kind(node[1])


def _weights(node: Node) -> Hashable:
    tree, path = node
    return tree.kind(path), *(
        (at, key, value.shape, value.statistics) for at, key, value in tree.within(path)
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
