"""Observe every operation of a step below autograd: forward, backward, optimizer and communication.

Digests are computed on the device that holds the tensor, in the same queue, and are read when the step has ended. So
the observation adds kernels to the queue and no synchronisation.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from referee.errors import described
from referee.numerics.describe import NoValuesError, has_operations, tensors_in
from referee.numerics.record.function_calls import OVERWRITING, UNSET, call_stack, sequence_number
from referee.numerics.record.tensor_statistics import digest, is_finite, resolve
from referee.numerics.repeat.trace import (
    BACKWARD,
    BEFORE,
    COMMUNICATION,
    FORWARD,
    INPUT,
    OPTIMIZER,
    OUTPUT,
    OUTSIDE,
    OperationEvent,
    StorageBlock,
    Trace,
    block_of,
    scalar_arguments,
    storage_of,
)

COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
ALLOCATING = UNSET | {"empty_permuted", "resize_"}
WHOLE = OVERWRITING | {"zero_", "zero", "fill", "copy", "_foreach_zero_", "_foreach_copy_"}
ALIASING = {"lift_fresh", "lift_fresh_copy"}  # the result is new memory, although the schema has an alias
UNDECLARED = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")  # they write running statistics
NO_DIGEST = torch.zeros((), dtype=torch.int64)  # the reason is in `_unknown`
CHECKED = ("returned ", "gradient of ")  # results whose values should be finite


class OperationObserver(TorchDispatchMode):
    """Trace the operations of a step.

    modules: by name, for the places. synchronise: called before and after each operation. fill: the content of memory
    that torch.empty returns; None: as it is. capture: number of the operation whose tensors are kept in `captured`.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | None = None,
        synchronise: Callable[[], object] = lambda: None,
        fill: float | None = None,
        capture: int | None = None,
    ) -> None:
        super().__init__()
        self.synchronise, self.fill, self.capture = synchronise, fill, capture
        self.captured: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._blocks: dict[int, StorageBlock] = {}
        self._names: dict[int, str] = {}  # identity of a module or a parameter -> its path
        for name, module in (modules or {}).items():
            for path, part in [*module.named_modules(), *module.named_parameters()]:
                self._names[id(part)] = ".".join(filter(None, (name, path))) or type(part).__name__
        self._within: list[str] = []
        self._places: dict[int, tuple[str, str]] = {}  # autograd number -> place and source in forward
        self._optimizing = 0
        self._events: list[
            OperationEvent
        ] = []  # whose digests are places in _digests until the step has ended
        self._digests: list[Tensor] = []
        self._unknown: dict[int, str] = {}  # reasons of tensors without a digest, by their place in _digests
        self._results: dict[str, int] = {}
        self._makers: dict[str, int] = {}
        self._not_finite: list[str] = []
        self._expected: list[tuple[int, int, int, int]] = []  # two digests that must be equal, reader, input
        # memory in communication -> operation, output, tensor
        self._pending: dict[int, tuple[OperationEvent, int, Tensor]] = {}

    # -- hooks of modules and optimizers

    @contextlib.contextmanager
    def running(self) -> Iterator[OperationObserver]:
        """Observe what runs in the block. Code that torch compiled runs as written."""
        hooks = nn.modules.module
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(lambda *call: self._count_optimizers(1)),
            register_optimizer_step_post_hook(lambda *call: self._count_optimizers(-1)),
        ]
        compiles = "torch._dynamo" in sys.modules
        try:
            with torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext(), self:
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._within.append(self._names.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._within:
            self._within.pop()

    def _count_optimizers(self, change: int) -> None:
        self._optimizing += change

    # -- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if any(has_operations(kind) for kind in types):
            return NotImplemented  # the operations within a tensor subclass follow
        name = func._schema.name.rpartition("::")[2]
        if _is_view(func) and name not in ALIASING:
            return func(*args, **kwargs)
        communicates = func.namespace in COLLECTIVES
        read, written = _arguments(func, args, kwargs, name, communicates)
        place, source, phase = self._where(communicates)
        event = OperationEvent(str(func), phase, place, source, [], [], [], [])
        self._events.append(event)
        self._settle([*read, *written])
        self.synchronise()
        for position, tensor in enumerate(read):
            self._read(event, position, tensor)
        event.scalars = scalar_arguments(func, args, kwargs)
        is_captured = self.capture == len(self._events) - 1
        if is_captured:
            self.captured[0].extend(tensor.detach().clone() for tensor in read)
        output = func(*args, **kwargs)
        self.synchronise()
        outputs = [*written, *_new_tensors(output, read, written, name)]
        for tensor in outputs:
            self._wrote(event, name, tensor, communicates)
        if is_captured:
            self.captured[1].extend(tensor.detach().clone() for tensor in outputs)
        return output

    def _read(self, event: Any, position: int, tensor: Tensor) -> None:
        index = self._digest(tensor)
        event.inputs.append(index)
        block = block_of(tensor, self._blocks)
        event.writers.append(block.writer if block else BEFORE)
        if block and block.unset:
            event.unset.append(position)
        number = len(self._events) - 1
        if block and (before := block.expect(tensor, index)) is not None:
            self._expected.append((before, index, number, position))

    def _wrote(self, event: Any, name: str, tensor: Tensor, communicates: bool) -> None:
        block = block_of(tensor, self._blocks)
        if block:
            block.written += 1
            block.writer = len(self._events) - 1
        if name in ALLOCATING and not (name == "resize_" and block and block.written > 1):
            self._allocated(block, tensor)
        elif communicates:
            self._pending[_storage(tensor)] = event, len(event.outputs), tensor
            event.outputs.append(None)
        else:
            event.outputs.append(self._digest(tensor))
            if block:
                block.expect(tensor, event.outputs[-1])

    def _allocated(self, block: StorageBlock | None, tensor: Tensor) -> None:
        if block:
            block.unset = True
        if self.fill is not None and tensor.numel() and not tensor.is_meta:
            tensor.fill_(self.fill if tensor.is_floating_point() or tensor.is_complex() else self.fill != 0.0)

    def _settle(self, tensors: Sequence[Tensor]) -> None:
        """Hash the results of communication that are about to be used: the caller has waited for them."""
        for key in {_storage(tensor) for tensor in tensors} & self._pending.keys() if self._pending else ():
            event, position, tensor = self._pending.pop(key)
            event.outputs[position] = self._digest(tensor)  # type: ignore[index]

    def _digest(self, tensor: Tensor) -> int:
        """Return the place of a tensor's digest in _digests."""
        reason = ""
        try:
            value = digest(tensor)
            if type(value) is not Tensor:
                reason = f"computed as {type(value).__name__}"
        except NoValuesError as error:
            reason = str(error).partition("\n")[0]
        except Exception as error:  # a subclass of Tensor can fail in any way; the step goes on
            reason = described(error)
        if reason:
            self._unknown[len(self._digests)] = reason
        self._digests.append(NO_DIGEST if reason else value)
        return len(self._digests) - 1

    def _where(self, communicates: bool) -> tuple[str, str, str]:
        """Return place, source and phase of the operation that runs now."""
        place = self._within[-1] if self._within else ""
        if torch._C._current_graph_task_id() != -1:  # in backward
            node: Any = torch._C._current_autograd_node()
            if node is not None and node.name().endswith("AccumulateGrad"):
                path = self._names.get(id(node.variable), "")
                found = (f"gradient of {path}" if path else "", "")
            else:
                found = self._places.get(node._sequence_nr() if node is not None else -1, ("", ""))
            return found[0] or place, found[1], COMMUNICATION if communicates else BACKWARD
        source = _source()
        self._places[sequence_number() - 1] = (place, source)
        if communicates:
            return place, source, COMMUNICATION
        if self._optimizing:
            return place, source, OPTIMIZER
        return place, source, FORWARD if self._within else OUTSIDE

    # -- the end

    def note_results(self, results: Mapping[str, Tensor]) -> None:
        """Hash the results of the step."""
        self._settle(list(results.values()))
        for name, tensor in results.items():
            self._results[name] = self._digest(tensor)
            block = block_of(tensor, self._blocks)
            self._makers[name] = block.writer if block else BEFORE
            if name.startswith(CHECKED) and not is_finite(tensor):
                self._not_finite.append(name)

    def trace(self, error: str = "") -> Trace:
        """Return the trace, after the last operation."""
        self._settle([tensor for _, _, tensor in self._pending.values()])
        values, unknown = resolve(self._digests), self._unknown
        for event in self._events:
            sides = ((INPUT, event.inputs), (OUTPUT, event.outputs))
            event.unknown = [(side, unknown[n]) for side, places in sides for n in places if n in unknown]
            event.inputs, event.outputs = ([values[n] for n in places] for _, places in sides)
        changed = [
            (reader, position)
            for one, other, reader, position in self._expected
            if values[one] != values[other] and not {one, other} & unknown.keys()
        ]
        results = {name: values[n] for name, n in self._results.items()}
        reasons = {name: unknown[n] for name, n in self._results.items() if n in unknown}
        return Trace(self._events, results, self._makers, changed, error, reasons, self._not_finite)


def _arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, communicates: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that the operation reads, and those that it writes."""
    if communicates or name.startswith(UNDECLARED):
        every = tensors_in([list(args), dict(kwargs)])
        return every, every
    read: list[Tensor] = []
    written: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        tensors = tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))
        writes = argument.alias_info is not None and argument.alias_info.is_write
        only_written = writes and (argument.is_out or (position == 0 and name in WHOLE) or name in ALLOCATING)
        written += tensors if writes else []
        read += [] if only_written else tensors
    return read, written


def _new_tensors(output: Any, read: list[Tensor], written: list[Tensor], name: str) -> list[Tensor]:
    """Return the results of an operation with memory of their own."""
    identities = {id(tensor) for tensor in written}
    old = {_storage(tensor) for tensor in [*read, *written]}
    return [
        tensor
        for tensor in tensors_in(output)
        if id(tensor) not in identities
        and (name in ALIASING or _storage(tensor) not in old or tensor.layout is not torch.strided)
    ]


def _is_view(func: Any) -> bool:
    """Return whether every result is a view of an argument, and nothing is written."""
    returns = func._schema.returns
    return bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )


def _storage(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    return id(tensor) if storage is None else storage._cdata


def _source() -> str:
    """Return file:line of the caller's code that runs now."""
    lines = call_stack()
    if not lines:
        return ""
    path, _, rest = lines[0].removeprefix("File ").partition(", line ")
    return f"{os.path.basename(path)}:{rest.partition(',')[0]}"
