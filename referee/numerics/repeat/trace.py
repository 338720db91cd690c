"""The trace of a step: every operation in order of execution, with the digests of its inputs and outputs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from referee.numerics.describe import SCALARS

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
COMMUNICATION, OUTSIDE = "communication", "outside of modules"
INPUT, OUTPUT = "input", "output"
PLAIN_TYPES = (*SCALARS, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)
MOST_TEXT = 80  # characters of a scalar argument
READ = "aten._local_scalar_dense"  # tensor.item()
BEFORE = -1  # writer of memory that exists before the step


@dataclass
class OperationEvent:
    """An operation that ran."""

    name: str
    phase: str
    place: str = ""  # path of the module, or the parameter of a gradient
    source: str = ""  # innermost line of the caller's code, file:line
    inputs: Sequence[int] = ()  # digests in the order of the arguments; 0 where unknown
    outputs: Sequence[int] = ()
    writers: Sequence[int] = ()  # for each input the operation that wrote its memory last, or BEFORE
    unset: Sequence[int] = ()  # inputs in memory of torch.empty, whose elements may not all be written
    scalars: Mapping[str, str] = field(default_factory=dict)  # arguments that are no tensors: name -> text
    unknown: Sequence[tuple[str, str]] = ()  # (INPUT or OUTPUT, reason) of each tensor without a digest

    @property
    def knows_inputs(self) -> bool:
        """Return whether every input has a digest."""
        return all(side != INPUT for side, _ in self.unknown)

    @property
    def title(self) -> str:
        """Return name, phase and place in one phrase, as in "aten.mm.default (forward, blocks.0.mlp.fc)"."""
        where = ", ".join(part for part in (self.phase, self.place) if part)
        return f"{self.name} ({where})" + (f" at {self.source}" if self.source else "")


def scalar_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return name and text of each argument of a plain type. Objects, such as generators, have no value to compare."""
    found = {}
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        values = list(given) if isinstance(given, list | tuple) else [given]
        if all(isinstance(value, PLAIN_TYPES) for value in values):
            text = repr(given)
            more = f"... (CRC-32 {zlib.crc32(text.encode()):#010x})" if len(text) > MOST_TEXT else ""
            found[argument.name] = text[:MOST_TEXT] + more
    return found


@dataclass(frozen=True)
class Trace:
    """One repetition."""

    events: Sequence[OperationEvent]
    results: Mapping[str, int] = field(default_factory=dict)  # digest of each result by name
    makers: Mapping[str, int] = field(default_factory=dict)  # the operation that wrote each result last
    # (reader, input) of memory whose content changed although no operation of the trace wrote it
    overwritten: Sequence[tuple[int, int]] = ()
    error: str = ""  # of a step that raised one
    unknown: Mapping[str, str] = field(default_factory=dict)  # results without a digest, with the reason
    not_finite: Sequence[str] = ()  # returned tensors and gradients with NaN or infinity

    def uncompared(self) -> list[str]:
        """Return operations and results with a tensor that has no digest, and the reason."""
        found = [f"{event.title}: {event.unknown[0][1]}" for event in self.events if event.unknown]
        return found + [f"{name}: {reason}" for name, reason in self.unknown.items()]


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
    are no difference, and of unequal results the operations that lead to them are searched first.
    """
    pairs = list(zip(one.events, other.events, strict=False))
    numbers: list[int] = []
    same_path = len(one.events) == len(other.events) and all(a.name == b.name for a, b in pairs)
    if same_path and one.error == other.error:
        if one.results and one.results == other.results:
            return None
        numbers = sorted(_leading_to_results(one, other))
    for number in [*numbers, *range(len(pairs))]:
        if found := _of_operation(number, *pairs[number]):
            return found
    number = len(pairs)
    if one.error != other.error:
        return TraceDifference("error", number, text=one.error or other.error)
    if len(one.events) != len(other.events):
        longer = max(one.events, other.events, key=len)
        return TraceDifference("operations", number, text=f"{longer[number].title} runs in one of them only")
    differing = list(_unequal(one.results, other.results))
    return TraceDifference("results", text=", ".join(differing[:3])) if differing else None


def _of_operation(number: int, one: OperationEvent, other: OperationEvent) -> TraceDifference | None:
    """Compare an operation of two traces: which it is, its inputs, other arguments, and outputs."""
    if one.name != other.name or len(one.inputs) != len(other.inputs):
        text = f"{one.title} in one repetition, {other.title} in another"
        return TraceDifference("operations", number, text=text)
    if one.inputs != other.inputs:
        return TraceDifference("input", number, _first(one.inputs, other.inputs))
    for name in _unequal(one.scalars, other.scalars):
        texts = [event.scalars.get(name, "an object") for event in (one, other)]
        text = f"argument {name} of {one.title} is {' in one repetition, '.join(texts)} in another"
        return TraceDifference("scalar", number, text=text)
    if one.outputs != other.outputs:
        return TraceDifference("output", number, _first(one.outputs, other.outputs))
    return None


def _leading_to_results(one: Trace, other: Trace) -> set[int]:
    """Return the operations that unequal results were computed from, by unequal inputs."""
    live = {one.makers.get(name, BEFORE) for name in _unequal(one.results, other.results)} - {BEFORE}
    for number in range(len(one.events) - 1, -1, -1):
        if number in live:
            a, b = one.events[number], other.events[number]
            inputs = zip(a.writers, a.inputs, b.inputs, strict=False)
            live |= {writer for writer, x, y in inputs if x != y} - {BEFORE}
            if a.scalars != b.scalars:
                live |= _read_by_python(one, other, number)
    return live


def _read_by_python(one: Trace, other: Trace, before: int) -> set[int]:
    """Return the operations before one that gave Python unequal values of tensors, as item() does."""
    pairs = enumerate(zip(one.events[:before], other.events[:before], strict=True))
    return {number for number, (a, b) in pairs if a.name.startswith(READ) and a.inputs != b.inputs}


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    return (name for name in {**one, **other} if one.get(name) != other.get(name))


def _first(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@dataclass
class StorageBlock:
    """The memory of one storage."""

    reference: StorageWeakRef  # keeps torch from using the identity of a freed storage for another one
    place: tuple[int, int]  # address and size
    writer: int = BEFORE  # the last operation that wrote it
    written: int = 0  # number of writes
    unset: bool = False  # of torch.empty or a relative, so that elements may never have been written
    known: dict[Any, tuple[int, int]] = field(default_factory=dict)  # view -> `written` then, its digest

    def expect(self, tensor: Tensor, digest: int) -> int | None:
        """Note the place of a view's digest. Return that of an earlier one that must be equal.

        None for the first of a view, and for a tensor that consists of several, as a sparse one.
        """
        if with_memory(tensor) is not tensor:
            return None
        form = tensor.numel() if tensor.is_contiguous() else (tensor.shape, tensor.stride())
        key = (form, tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
        before = self.known.get(key)
        if before is not None and before[0] == self.written:
            return before[1]
        self.known[key] = (self.written, digest)
        return None


def block_of(tensor: Tensor, blocks: dict[int, StorageBlock]) -> StorageBlock | None:
    """Return the block of a tensor, a new one on first use; None for tensors without memory."""
    storage = storage_of(tensor)
    try:
        place = (storage.data_ptr(), storage.nbytes()) if storage is not None else (0, 0)
    except RuntimeError:  # of a fake tensor
        return None
    if storage is None or not all(place):
        return None
    reference = StorageWeakRef(storage)
    block = blocks.setdefault(reference.cdata, StorageBlock(reference, place))
    if block.place != place:  # resized
        block.place = place
        block.known.clear()
    return block


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a tensor; None where there is none."""
    try:
        return with_memory(tensor).untyped_storage()
    except RuntimeError:
        return None


def with_memory(tensor: Tensor) -> Tensor:
    """Return the tensor that has the memory: the values of a sparse or nested tensor, else the tensor itself."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
