"""Read the records of a step: those of referee.numerics.Recorder and msProbe's dumps (section 4.3).

A record is a folder with dump.json and, optionally, stack.json, construct.json and dump_tensor_data.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from referee.errors import NumericsError
from referee.numerics.text_files import CONSTRUCT, DUMP, STACK, TENSORS, read_dump_json


@dataclass(frozen=True)
class Value:
    """A recorded argument: a tensor where dtype is set, else a plain value.

    parts: of a joined tensor, concatenated along the axis; added where axis is None. unknown: why a tensor has neither
    statistics nor values; "" where it has. layout: of one that is not dense, as "torch.sparse_coo" or "nested".
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    highest: float | None = None
    lowest: float | None = None
    mean: float | None = None
    norm: float | None = None
    nan_count: int | None = None
    inf_count: int | None = None
    checksum: str = ""
    any_order: str = ""  # a digest of the values in any order
    maker: str = ""  # the recorded call that returned the tensor
    file: Path | None = None
    requires_grad: bool | None = None
    is_parameter: bool = False
    plain: Any = None
    parts: tuple[Value, ...] = ()
    axis: int | None = None
    unknown: str = ""
    layout: str = ""

    @property
    def is_unknown(self) -> bool:
        """Return whether nothing of a tensor's values is known."""
        return bool(self.dtype and self.unknown) and not (self.checksum or self.has_values)

    @property
    def statistics(self) -> tuple[float | None, ...]:
        return self.highest, self.lowest, self.mean, self.norm

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def rms(self) -> float:
        """Return the root mean square; 0 where it is unknown."""
        return self.norm / math.sqrt(max(self.count, 1)) if self.norm else 0.0

    @property
    def floating(self) -> bool:
        return "float" in self.dtype or "complex" in self.dtype

    @property
    def has_values(self) -> bool:
        """Return whether the values were recorded."""
        if self.parts:
            return all(part.has_values for part in self.parts)
        return self.file is not None and self.file.exists()

    @property
    def finite(self) -> bool:
        """False where a NaN or an infinity is in the tensor. An infinite norm alone is none: squares overflow early."""
        if self.nan_count is not None:
            return not (self.nan_count or self.inf_count)
        numbers = (self.highest, self.lowest, self.mean)
        return all(math.isfinite(number) for number in numbers if number is not None)

    def describe(self) -> str:
        """Return the value in a few words."""
        if not self.dtype:
            return str(self.plain) if self.kind else "None"
        numbers = (
            f"{name} {number:.6g}"
            for name, number in zip(STATISTICS, self.statistics, strict=True)
            if number is not None
        )
        bad = ""
        if self.nan_count or self.inf_count:
            bad = f", {self.nan_count} NaN, {self.inf_count} Inf"
        return f"{self.dtype.removeprefix('torch.')} {list(self.shape)}: {', '.join(numbers)}{bad}"


STATISTICS = ("max", "min", "mean", "norm")
SIDES = {  # of a call -> its field
    "input": "inputs",
    "parameter": "parameters",
    "output": "outputs",
    "gradient": "gradients",
    "buffer": "buffers",
}


@dataclass(frozen=True)
class Call:
    """A call of a module or of a function, forward or backward.

    path: of the module, "" for the root; the label of a function, as in "Functional.gelu". number: of the call.
    inputs, parameters, outputs: by place, as in "0.hidden". gradients: of the module's parameters at the end of the
    step, at its last backward. raw: the row of dump.json. late: whether it is a function that the code calls outside
    of the modules after backward, of values that need no gradient: clipping, the optimizer.
    """

    name: str
    path: str
    type: str
    number: int
    backward: bool
    inputs: dict[str, Value]
    parameters: dict[str, Value]
    settings: dict[str, Any]
    outputs: dict[str, Value]
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    gradients: dict[str, Value] = field(default_factory=dict)
    late: bool = False
    buffers: dict[str, Value] = field(default_factory=dict)  # that the call has written

    @property
    def writes_parameter(self) -> bool:
        """Return whether it is a function that overwrites a parameter, as an optimizer does."""
        first = next(iter(self.inputs.values()), None)
        return self.path[-1:] == "_" and first is not None and first.is_parameter

    @property
    def sides(self) -> dict[str, dict[str, Value]]:
        """Return the values by side and place."""
        return {side: getattr(self, name) for side, name in SIDES.items()}

    @property
    def values(self) -> Iterator[Value]:
        return (value for values in self.sides.values() for value in values.values())

    def with_sides(self, sides: Mapping[str, dict[str, Value]]) -> Call:
        """Return the call with other values at the given sides."""
        fields: dict[str, Any] = {SIDES[side]: values for side, values in sides.items()}
        return replace(self, **fields)

    @property
    def is_module(self) -> bool:
        return bool(self.type)

    @property
    def forward_name(self) -> str:
        """Return the name of the forward of this call."""
        head, _, tail = self.name.rpartition("backward")
        return f"{head}forward{tail}" if self.backward else self.name


@dataclass(frozen=True)
class StepRecord:
    """The calls of a step of a rank, in the order of execution; an outer call before those within it.

    selection: the settings that say which calls are recorded: level, list, scope, data_mode. complete: whether every
    recorded row is there.
    """

    folder: Path
    calls: dict[str, Call]
    parents: dict[str, str | None]
    stacks: dict[str, list[str]]
    notes: list[str]
    by_msprobe: bool = False
    selection: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = True
    incomplete: Sequence[str] = ()  # what is not recorded
    exception: tuple[str, str] | None = None  # the call that raised, and what
    renamed: Mapping[str, str] = field(
        default_factory=dict
    )  # joined calls: the name that a call had -> its name

    def within(self, name: str) -> str | None:
        """Return the innermost recorded call around a call."""
        return next((outer for outer in self.around(name) if outer in self.calls), None)

    def around(self, name: str) -> Iterator[str]:
        """Yield the names of what is around a call, the innermost first, each once."""
        outer, visited = self.parents.get(name), {name}
        while outer is not None and outer not in visited:
            yield outer
            visited.add(outer)
            outer = self.parents.get(outer)


MODULE = re.compile(
    r"(?:Module|Cell)\.(?:(?P<path>.+)\.)?(?P<type>[^.]+)\.(?P<way>forward|backward)\.(?P<n>\d+)"
)
GRADIENTS = re.compile(r"(?:Module|Cell)\.(?:(?P<path>.+)\.)?(?P<type>[^.]+)\.parameters_grad(?:\.\d+)?")
FUNCTION = re.compile(r"(?P<path>.+)\.(?P<n>\d+)\.(?P<way>forward|backward)")


def find_records(path: Path) -> dict[str, Path]:
    """Return the folders with a dump.json in a dump, a step or a rank: "step0/rank0" -> folder."""
    if not path.exists():
        raise NumericsError(f"{path} does not exist; fix: give the folder of a record, such as dump/step0")
    if path.is_file() and path.name == DUMP:
        path = path.parent
    folders = sorted(rank_folders(path), key=lambda folder: (len(folder.parts), _natural(folder)))
    found = {folder.relative_to(path).as_posix(): folder for folder in folders}
    if not found:
        raise NumericsError(
            f"{path} has no {DUMP}; fix: give a folder that a recorder wrote, such as dump/step0"
        )
    return found


def rank_folders(path: Path, depth: int = 2) -> Iterator[Path]:
    """Yield the folders with a dump.json. OSError where a folder cannot be read: its ranks are unknown."""
    if path.is_file():
        return
    with os.scandir(path) as entries:
        kinds = {entry.name: entry.is_dir() for entry in entries if entry.name != TENSORS}
    if DUMP in kinds:
        yield path
    for name, is_folder in kinds.items():
        if is_folder and depth:
            yield from rank_folders(path / name, depth - 1)


def _natural(path: Path) -> list[Any]:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", str(path))]


def read_record(folder: Path) -> StepRecord:
    """Read the record of a rank. NumericsError names a file that cannot be used."""
    content = _read_json(folder / DUMP)
    data = content.get("data")
    if not isinstance(data, dict):
        raise NumericsError(
            f'{folder / DUMP} has no "data"; fix: record the step again, or give another folder'
        )
    if not data:
        raise NumericsError(
            f"{folder / DUMP} has no rows; fix: record with start() before forward and stop() after it"
        )
    calls = _calls(folder, data)
    construct = _optional(folder / CONSTRUCT)
    parents = {name: parent if isinstance(parent, str) else None for name, parent in construct.items()}
    parents |= {name: row["parent"] for name, row in data.items() if isinstance(row.get("parent"), str)}
    calls |= {name: replace(calls[name], late=True) for name in _late(calls, parents)}
    count, level = content.get("rows"), content.get("level")
    complete = not isinstance(count, int) or len(data) >= count
    lacking = [str(text) for text in content.get("incomplete") or []]
    if not complete:
        lacking.append(f"{DUMP} has {len(data)} of {count} rows: the record is not complete")
    names = ("level", "list", "scope", "data_mode")
    selection: dict[str, Any] = {name: content[name] for name in names if name in content}
    if not construct and level != "L1":
        selection["construct"] = "missing"
    exception = content.get("exception")
    record = StepRecord(
        folder,
        calls,
        parents,
        _stacks(folder),
        _notes(folder, content, calls),
        "notes" not in content,
        selection,
        complete,
        lacking,
        (str(exception[0]), str(exception[1])) if exception else None,
    )
    return replace(record, calls=_outer_first(record))


def _calls(folder: Path, data: Mapping[str, Any]) -> dict[str, Call]:
    """Return the calls in the order of dump.json, with the gradients of the parameters."""
    calls: dict[str, Call] = {}
    gradients: list[tuple[str, dict[str, Value]]] = []
    for name, row in data.items():
        if not isinstance(row, dict):
            raise NumericsError(f"{folder / DUMP}: row {name} is not an object; fix: record the step again")
        if found := GRADIENTS.fullmatch(name):
            values = _flatten(row, folder, name)
            gradients.append(
                (found["path"] or "", {place.removesuffix(".0"): value for place, value in values.items()})
            )
        elif call := _call(name, row, folder):
            calls[name] = call
    if not calls and not gradients:
        raise NumericsError(
            f"{folder / DUMP} names no module or function; fix: give a record of L0, L1 or mix"
        )
    for path, values in gradients:
        _attach(calls, path, values)
    return calls


def _notes(folder: Path, content: Mapping[str, Any], calls: Mapping[str, Call]) -> list[str]:
    """Return the notes of the recorder, and what is not as it should be."""
    texts = list(map(str, content.get("notes") or []))
    if not (folder / CONSTRUCT).exists() and content.get("level") != "L1":
        texts.append(f"{CONSTRUCT} is missing: the modules around calls are unknown")
    values = [value for call in calls.values() for value in call.values]
    if absent := sum(value.file is not None and not value.has_values for value in values):
        texts.append(
            f"the values of {absent} tensors are missing in {TENSORS}: statistics are compared instead"
        )
    return texts


def _read_json(path: Path) -> dict[str, Any]:
    content = read_dump_json(path, "record the step again, or copy the file again")
    if not isinstance(content, dict):
        raise NumericsError(f"{path} is not a JSON object; fix: give a file that a recorder wrote")
    return content


def _optional(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.exists() else {}


def _stacks(folder: Path) -> dict[str, list[str]]:
    """Return the call stack of each call. Calls that have the same one are a group."""
    groups = _optional(folder / STACK).values()
    return {str(name): list(map(str, lines)) for names, lines in groups for name in names}


def _call(name: str, row: Mapping[str, Any], folder: Path) -> Call | None:
    found = MODULE.fullmatch(name)
    function = None if found else FUNCTION.fullmatch(name)
    match = found or function
    if match is None:
        return None
    inputs = _flatten(row.get("input_args", row.get("input")) or [], folder, name)
    inputs |= _flatten(row.get("input_kwargs") or {}, folder, name)
    settings = row.get("settings")
    return Call(
        name,
        match["path"] or "",
        found["type"] if found else "",
        int(match["n"]),
        match["way"] == "backward",
        inputs,
        _flatten(row.get("parameters") or {}, folder, name),
        settings if isinstance(settings, dict) else {},
        _flatten(row.get("output") or [], folder, name),
        row,
        buffers=_flatten(row.get("buffers") or {}, folder, name),
    )


def _flatten(tree: Any, folder: Path, name: str) -> dict[str, Value]:
    return dict(_leaves(tree, "", folder, name))


def _leaves(tree: Any, place: str, folder: Path, name: str) -> Iterator[tuple[str, Value]]:
    if isinstance(tree, dict) and not isinstance(tree.get("type"), str):
        parts: Iterator[tuple[Any, Any]] = iter(tree.items())
    elif isinstance(tree, list):
        parts = iter(enumerate(tree))
    else:
        yield place, _value(tree, folder, f"{name}, {place}")
        return
    for key, part in parts:
        yield from _leaves(part, f"{place}.{key}" if place else str(key), folder, name)


def _value(entry: Any, folder: Path, where: str) -> Value:
    if not isinstance(entry, dict):
        return Value("" if entry is None else type(entry).__name__, plain=entry)
    if not isinstance(entry.get("dtype"), str):
        return Value(entry["type"], plain=entry.get("value"))
    file = entry.get("data_name")
    try:
        return Value(
            entry["type"],
            entry["dtype"],
            tuple(map(int, entry.get("shape") or ())),
            _number(entry.get("Max")),
            _number(entry.get("Min")),
            _number(entry.get("Mean")),
            _number(entry.get("Norm")),
            nan_count=entry.get("nan_count"),
            inf_count=entry.get("inf_count"),
            checksum=str(entry.get("md5") or ""),
            any_order=str(entry.get("any_order") or ""),
            maker=str(entry.get("maker") or ""),
            file=folder / TENSORS / Path(file).name if isinstance(file, str) and file else None,
            requires_grad=entry.get("requires_grad"),
            is_parameter=entry.get("is_parameter") is True,
            unknown=str(entry.get("not_described") or ""),
            layout=str(entry.get("layout") or ""),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise NumericsError(
            f"{folder / DUMP}: {where} has an entry that is not a number; fix: record again"
        ) from error


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _late(calls: Mapping[str, Call], parents: Mapping[str, str | None]) -> list[str]:
    """Return the functions outside of the modules that the code called after backward without autograd."""
    found, started = [], False
    for name, call in calls.items():  # in the order of dump.json, which is that of the ends of calls
        started = started or call.backward
        inputs_grow = any(value.requires_grad and not value.is_parameter for value in call.inputs.values())
        outputs_grow = any(value.requires_grad for value in call.outputs.values())
        without = not inputs_grow and (not outputs_grow or call.writes_parameter)
        if started and without and not (call.backward or call.is_module or parents.get(name)):
            found.append(name)
    return found


def _attach(calls: dict[str, Call], path: str, values: dict[str, Value]) -> None:
    """Add the gradients of a module's parameters to its last backward.

    Where autograd hid its backward, an empty one is added. A module that is not called belongs to the one around it.
    """
    mine = [call for call in calls.values() if call.is_module and call.path == path]
    backward = [call for call in mine if call.backward]
    if backward:
        backward[-1].gradients.update(values)
    elif mine and any(value.dtype for value in values.values()):
        name = "backward".join(mine[-1].name.rsplit("forward", 1))
        empty = mine[-1].with_sides({side: {} for side in SIDES})
        calls[name] = replace(empty, name=name, backward=True, settings={}, gradients=values)
    elif path and not mine:
        outer, _, last = path.rpartition(".")
        _attach(calls, outer, {f"{last}.{place}": value for place, value in values.items()})


def _outer_first(record: StepRecord) -> dict[str, Call]:
    """Return the calls, forward before backward, each before those within it, otherwise as recorded."""
    chains = {name: (*reversed(list(record.around(name))), name) for name in record.calls}
    first: dict[tuple[bool, str], int] = {}  # position of a call, or of the first call within it
    for position, (name, chain) in enumerate(chains.items()):
        for outer in chain:
            first.setdefault((record.calls[name].backward, outer), position)

    def order(call: Call) -> tuple[bool, list[int]]:
        return call.backward, [first[call.backward, outer] for outer in chains[call.name]]

    return {call.name: call for call in sorted(record.calls.values(), key=order)}
