"""The trace of a step: every operation in order of execution, with the digests of its inputs and outputs."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from numerics.describe import SCALARS

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
COMMUNICATION, OUTSIDE = "communication", "outside of modules"
INPUT, OUTPUT = "input", "output"
PLAIN_TYPES = (*SCALARS, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)
MOST_TEXT = 80  # characters of a scalar argument
READ = "aten._local_scalar_dense"  # tensor.item()


@dataclass(frozen=True)
class OperationEvent:
    """An operation that ran.

    place: path of the module, or the parameter of a gradient. source: innermost line of the caller's code that torch
    is called from. inputs, outputs: digests in the order of the arguments. writers: for each input the number of the
    operation that wrote its memory last; -1 for memory from before the step. kinds: dtype and shape of the outputs,
    sizes: elements of the inputs. unset: inputs in memory of torch.empty, whose elements may not all be written.
    unknown: inputs and outputs without a digest, as (INPUT or OUTPUT, position, reason); their digests are 0.
    scalars: name and text of each argument that is not a tensor.
    """

    name: str
    phase: str
    place: str = ""
    source: str = ""
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    writers: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    unset: tuple[int, ...] = ()
    unknown: tuple[tuple[str, int, str], ...] = ()
    scalars: tuple[tuple[str, str], ...] = ()

    @property
    def knows_inputs(self) -> bool:
        """Return whether every input has a digest."""
        return all(side != INPUT for side, _, _ in self.unknown)

    @property
    def title(self) -> str:
        """Return name, phase and place in one phrase, as in "aten.mm.default (forward, blocks.0.mlp.fc)"."""
        where = ", ".join(part for part in (self.phase, self.place) if part)
        return f"{self.name} ({where})" + (f" at {self.source}" if self.source else "")


def scalar_arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[str, str], ...]:
    """Return name and text of each argument of a plain type. Objects, such as generators, have no value to compare."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        values = list(given) if isinstance(given, list | tuple) else [given]
        if all(isinstance(value, PLAIN_TYPES) for value in values):
            text = repr(given)
            more = f"... (CRC-32 {zlib.crc32(text.encode()):#010x})" if len(text) > MOST_TEXT else ""
            found.append((argument.name, text[:MOST_TEXT] + more))
    return tuple(found)


@dataclass(frozen=True)
class Overwritten:
    """Memory whose content changed between two operations, although no operation of the trace wrote it."""

    writer: int
    reader: int
    input: int


@dataclass(frozen=True)
class Overlap:
    """Two live tensors that share bytes and are not views of one another. first, second: "name at address, size"."""

    first: str
    second: str
    shared_bytes: int


@dataclass(frozen=True)
class Trace:
    """One repetition. results: digest of each result by name. error: of a step that raised one; else empty.

    makers: the operation that wrote each result last; -1 where none did. unknown: results without a digest.
    not_finite: returned tensors and gradients with NaN or infinity.
    """

    events: tuple[OperationEvent, ...]
    results: dict[str, int] = field(default_factory=dict)
    makers: dict[str, int] = field(default_factory=dict)
    overwritten: tuple[Overwritten, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    error: str = ""
    unknown: dict[str, str] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class Uncompared:
    """An operation or a result that could not be compared. name: its title. reason: of the first tensor."""

    is_result: bool
    name: str
    reason: str


def uncompared(traces: Iterable[Trace]) -> list[Uncompared]:
    """Return the operations with a tensor that has no digest, and such results, of all traces, each once."""
    operations: dict[tuple[int, str], str] = {}
    results: dict[str, str] = {}
    for trace in traces:
        for number, event in enumerate(trace.events):
            if event.unknown:
                operations.setdefault((number, event.title), event.unknown[0][2])
        results |= trace.unknown
    found = [Uncompared(False, title, reason) for (_, title), reason in sorted(operations.items())]
    return found + [Uncompared(True, name, reason) for name, reason in results.items()]


@dataclass(frozen=True)
class TraceDifference:
    """The first difference of two traces.

    kind: "output" (equal inputs, unequal output `position`), "input" (unequal input `position`, every output before
    is equal), "scalar" (equal inputs, another argument that is not a tensor), "operations" (another operation follows),
    "results" (operations agree, results do not), or "error". event: the number of the operation; -1 for "results".
    """

    kind: str
    event: int = -1
    position: int = 0
    text: str = ""


def first_difference(one: Trace, other: Trace) -> TraceDifference | None:
    """Return the first difference in the order of execution that a result depends on; None where results are equal.

    An operation may return memory that it never wrote, such as a workspace. So equal results with the same operations
    are no difference, and of unequal results the operations that lead to them are searched.
    """
    same_path = [event.name for event in one.events] == [event.name for event in other.events]
    if same_path and one.error == other.error and one.results and one.results == other.results:
        return None
    if same_path and one.error == other.error:
        found = _leading_to_results(one, other)
        if found is not None:
            return found
    return _in_order(one, other)


def earliest_difference(traces: Sequence[Trace]) -> tuple[TraceDifference, int]:
    """Return the first difference from the first trace that comes earliest, and the number of that trace."""
    found = [(first_difference(traces[0], trace), number) for number, trace in enumerate(traces)]
    listed = [(difference, number) for difference, number in found if difference]
    return min(listed, key=lambda item: item[0].event if item[0].event >= 0 else 1 << 60)


def without_effect(one: Trace, other: Trace) -> list[OperationEvent]:
    """Return the operations whose outputs differ although every result is equal."""
    if first_difference(one, other) is not None:
        return []
    return [a for a, b in zip(one.events, other.events, strict=False) if a.outputs != b.outputs]


def _leading_to_results(one: Trace, other: Trace) -> TraceDifference | None:
    """Return the first difference among the operations that unequal results were computed from."""
    unequal = [name for name, value in one.results.items() if other.results.get(name) != value]
    live = {one.makers.get(name, -1) for name in unequal} - {-1}
    for number in range(len(one.events) - 1, -1, -1):
        if number in live:
            a, b = one.events[number], other.events[number]
            pairs = enumerate(zip(a.inputs, b.inputs, strict=False))
            live |= {a.writers[position] for position, (x, y) in pairs if x != y} - {-1}
            if a.scalars != b.scalars:
                live |= _read_by_python(one, other, number)
    for number in sorted(live):
        a, b = one.events[number], other.events[number]
        if a.inputs == b.inputs and a.scalars != b.scalars:
            return _scalar(number, a, b)
        if a.inputs == b.inputs and a.outputs != b.outputs:
            return TraceDifference("output", number, _first(a.outputs, b.outputs))
        for position, (x, y) in enumerate(zip(a.inputs, b.inputs, strict=False)):
            writer = a.writers[position]
            if x != y and (writer < 0 or one.events[writer].outputs == other.events[writer].outputs):
                return TraceDifference("input", number, position)
    return None


def _in_order(one: Trace, other: Trace) -> TraceDifference | None:
    for number, (a, b) in enumerate(zip(one.events, other.events, strict=False)):
        if a.name != b.name or len(a.inputs) != len(b.inputs):
            return TraceDifference(
                "operations", number, 0, f"{a.title} in one repetition, {b.title} in another"
            )
        if a.inputs != b.inputs:
            return TraceDifference("input", number, _first(a.inputs, b.inputs))
        if a.scalars != b.scalars:
            return _scalar(number, a, b)
        if a.kinds != b.kinds and len(a.outputs) == len(b.outputs):
            return TraceDifference("operations", number, 0, f"{a.title} returns {a.kinds} and {b.kinds}")
        if a.outputs != b.outputs:
            return TraceDifference("output", number, _first(a.outputs, b.outputs))
    if one.error != other.error:
        number = min(len(one.events), len(other.events))
        return TraceDifference("error", number, 0, one.error or other.error)
    if len(one.events) != len(other.events):
        number = min(len(one.events), len(other.events))
        longer = max(one.events, other.events, key=len)
        return TraceDifference("operations", number, 0, f"{longer[number].title} runs in one of them only")
    differing = [name for name, value in one.results.items() if other.results.get(name) != value]
    differing += [name for name in other.results if name not in one.results]
    return TraceDifference("results", -1, 0, ", ".join(differing[:3])) if differing else None


def _read_by_python(one: Trace, other: Trace, before: int) -> set[int]:
    """Return the operations before one that gave Python unequal values of tensors, as item() does."""
    pairs = enumerate(zip(one.events[:before], other.events[:before], strict=True))
    return {number for number, (a, b) in pairs if a.name.startswith(READ) and a.inputs != b.inputs}


def _scalar(number: int, one: OperationEvent, other: OperationEvent) -> TraceDifference:
    """Name the first argument that is not a tensor and differs."""
    values, others = dict(one.scalars), dict(other.scalars)
    name = next(name for name in values | others if values.get(name) != others.get(name))
    one_text, other_text = (found.get(name, "an object") for found in (values, others))
    text = f"argument {name} of {one.title} is {one_text} in one repetition, {other_text} in another"
    return TraceDifference("scalar", number, 0, text)


def _first(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
