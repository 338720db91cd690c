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

from numerics.describe import NoValuesError, tensors_in
from numerics.errors import described
from numerics.record.backward_calls import sequence_number
from numerics.record.function_calls import OVERWRITING, UNSET, call_stack
from numerics.record.tensor_digest import digest, is_finite
from numerics.record.tensor_statistics import resolve
from numerics.repeat.memory import BEFORE, MemoryMap, StorageBlock, with_memory
from numerics.repeat.trace import (
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    INPUT,
    OPTIMIZER,
    OUTPUT,
    OUTSIDE,
    OperationEvent,
    Overwritten,
    Trace,
    scalar_arguments,
)

COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
ALLOCATING = UNSET | {"empty_permuted", "resize_"}
WHOLE = OVERWRITING | {"zero_", "zero", "fill", "copy", "_foreach_zero_", "_foreach_copy_"}
ALIASING = {"lift_fresh", "lift_fresh_copy"}  # the result is new memory, although the schema has an alias
UNDECLARED = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")  # they write running statistics
NO_DIGEST = torch.zeros((), dtype=torch.int64)  # `unknown` of the event has the reason
CHECKED = ("returned ", "gradient of ")  # results whose values should be finite


class OperationObserver(TorchDispatchMode):
    """Trace the operations of a step.

    modules: by name, for the places. synchronise: called before and after each operation. fill: "zeros" or "NaN", the
    content of memory that torch.empty returns. capture: number of the operation whose tensors are kept in `captured`.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | None = None,
        synchronise: Callable[[], object] | None = None,
        fill: str = "",
        capture: int | None = None,
    ) -> None:
        super().__init__()
        self.synchronise, self.fill, self.capture = synchronise, fill, capture
        self.captured: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.memory = MemoryMap()
        self.results: dict[str, int] = {}
        self.makers: dict[str, int] = {}
        self._names = _module_names(modules or {})
        self._parameters = _parameter_names(modules or {})
        self._within: list[str] = []
        self._places: dict[int, tuple[str, str]] = {}  # autograd number -> place and source in forward
        self._optimizing = 0
        self._rows: list[dict[str, Any]] = []
        self._digests: list[Tensor] = []
        self._not_finite: list[str] = []
        self._unknown: dict[int, str] = {}  # reasons of tensors without a digest, by their place in _digests
        self._expected: list[tuple[int, int, int, int, int]] = []  # two digests, writer, reader, input
        self._pending: dict[
            int, tuple[int, int, Tensor]
        ] = {}  # memory in communication -> event, position, tensor

    # -- hooks of modules and optimizers

    @contextlib.contextmanager
    def running(self) -> Iterator[OperationObserver]:
        """Observe what runs in the block. Code that torch compiled runs as written."""
        hooks = nn.modules.module
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._begin_optimizer),
            register_optimizer_step_post_hook(self._end_optimizer),
        ]
        eager = (
            torch.compiler.set_stance("force_eager")
            if "torch._dynamo" in sys.modules
            else contextlib.nullcontext()
        )
        try:
            with eager, self:
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._within.append(self._names.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._within:
            self._within.pop()

    def _begin_optimizer(self, *unused: Any) -> None:
        self._optimizing += 1

    def _end_optimizer(self, *unused: Any) -> None:
        self._optimizing -= 1

    # -- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if any(_has_operations(kind) for kind in types):
            return NotImplemented  # the operations within a tensor subclass follow
        name = func._schema.name.rpartition("::")[2]
        if _is_view(func) and name not in ALIASING:
            return func(*args, **kwargs)
        communicates = func.namespace in COLLECTIVES
        read, written = _arguments(func, args, kwargs, name, communicates)
        number = len(self._rows)
        place, source, phase = self._where(communicates)
        row: dict[str, Any] = {"name": str(func), "phase": phase, "place": place, "source": source}
        self._rows.append(row)
        self._settle([*read, *written])
        if self.synchronise:
            self.synchronise()
        row["inputs"], row["writers"], row["unset"] = [], [], []
        for position, tensor in enumerate(read):
            self._read(row, number, position, tensor)
        row["scalars"] = scalar_arguments(func, args, kwargs)
        row["sizes"] = [tensor.numel() for tensor in read]
        if self.capture == number:
            self.captured[0].extend(tensor.detach().clone() for tensor in read)
        output = func(*args, **kwargs)
        if self.synchronise:
            self.synchronise()
        self._wrote(row, number, name, output, read, written, communicates)
        return output

    def _read(self, row: dict[str, Any], number: int, position: int, tensor: Tensor) -> None:
        block = self.memory.block(tensor, f"input of {row['name']}")
        row["writers"].append(block.writer if block else BEFORE)
        if block and block.unset:
            row["unset"].append(position)
        index = self._digest(tensor)
        row["inputs"].append(index)
        if block:
            before = self.memory.expect(block, tensor, index, number)
            if before is not None:
                writer = block.writer if block.writer != BEFORE else before[1]
                self._expected.append((before[0], index, writer, number, position))

    def _wrote(
        self,
        row: dict[str, Any],
        number: int,
        name: str,
        output: Any,
        read: list[Tensor],
        written: list[Tensor],
        communicates: bool,
    ) -> None:
        row["outputs"], row["kinds"] = [], []
        addresses = {id(tensor) for tensor in written}
        old = {_storage(tensor) for tensor in [*read, *written]}
        results = [tensor for tensor in tensors_in(output) if id(tensor) not in addresses]
        fresh = [
            tensor
            for tensor in results
            if name in ALIASING or _storage(tensor) not in old or tensor.layout is not torch.strided
        ]
        for tensor in [*written, *fresh]:
            row["kinds"].append(f"{tensor.dtype} {'nested' if tensor.is_nested else list(tensor.shape)}")
            block = self.memory.block(tensor, f"output of {row['name']}")
            if block and block.name.startswith("input"):
                block.name = f"output of {row['name']}"
            if block:
                self.memory.write(block, number)
            if name in ALLOCATING and not (name == "resize_" and block and block.written > 1):
                self._allocated(block, tensor)
                continue
            if communicates:
                self._pending[_storage(tensor)] = (number, len(row["outputs"]), tensor)
                row["outputs"].append(None)
                continue
            index = self._digest(tensor)
            row["outputs"].append(index)
            if block:
                self.memory.expect(block, tensor, index, number)
        if self.capture == number:
            self.captured[1].extend(tensor.detach().clone() for tensor in [*written, *fresh])

    def _allocated(self, block: StorageBlock | None, tensor: Tensor) -> None:
        if block:
            block.unset = True
        if self.fill and tensor.numel() and not tensor.is_meta:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(float("nan") if self.fill == "NaN" else 0.0)
            else:
                tensor.fill_(1 if self.fill == "NaN" else 0)

    def _settle(self, tensors: Sequence[Tensor]) -> None:
        """Hash the results of communication that an operation is about to use: the caller has waited for them."""
        if not self._pending:
            return
        for key in [_storage(tensor) for tensor in tensors]:
            if key in self._pending:
                number, position, tensor = self._pending.pop(key)
                self._rows[number]["outputs"][position] = self._digest(tensor)

    def _digest(self, tensor: Tensor) -> int:
        try:
            value = digest(tensor)
        except Exception as error:  # a subclass of Tensor can fail in any way; the step goes on
            reason = str(error).partition("\n")[0]
            self._unknown[len(self._digests)] = (
                reason if isinstance(error, NoValuesError) else described(error)
            )
            value = NO_DIGEST
        if type(value) is not Tensor:
            self._unknown[len(self._digests)] = f"computed as {type(value).__name__}"
            value = NO_DIGEST
        self._digests.append(value)
        return len(self._digests) - 1

    def _reasons(self, row: Mapping[str, Any]) -> tuple[tuple[str, int, str], ...]:
        """Return the tensors of an operation that have no digest."""
        return tuple(
            (side, position, self._unknown[index])
            for side in (INPUT, OUTPUT)
            for position, index in enumerate(row.get(f"{side}s", ()))
            if index in self._unknown
        )

    def _where(self, communicates: bool) -> tuple[str, str, str]:
        """Return place, source and phase of the operation that runs now."""
        place = self._within[-1] if self._within else ""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            node = torch._C._current_autograd_node()
            name = node.name() if node is not None else ""
            if name.endswith("AccumulateGrad"):
                place = self._parameters.get(id(node.variable), "")  # type: ignore[union-attr, attr-defined]
                found = (f"gradient of {place}" if place else "", "")
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
            self.results[name] = self._digest(tensor)
            block = self.memory.block(tensor, "result")
            self.makers[name] = block.writer if block else BEFORE
            if name.startswith(CHECKED) and not is_finite(tensor):
                self._not_finite.append(name)

    def trace(self, error: str = "") -> Trace:
        """Return the trace, after the last operation."""
        for number, position, tensor in self._pending.values():
            self._rows[number]["outputs"][position] = self._digest(tensor)
        self._pending.clear()
        values = resolve(self._digests)
        events = tuple(
            OperationEvent(
                **{key: row[key] for key in ("name", "phase", "place", "source")},
                inputs=tuple(values[n] for n in row["inputs"]),
                outputs=tuple(values[n] for n in row.get("outputs", ())),
                writers=tuple(row["writers"]),
                kinds=tuple(row.get("kinds", ())),
                sizes=tuple(row.get("sizes", ())),
                unset=tuple(row["unset"]),
                unknown=self._reasons(row),
                scalars=row["scalars"],
            )
            for row in self._rows
        )
        changed = tuple(
            Overwritten(writer, reader, position)
            for one, other, writer, reader, position in self._expected
            if values[one] != values[other] and not {one, other} & self._unknown.keys()
        )
        results = {name: values[n] for name, n in self.results.items()}
        unknown = {name: self._unknown[n] for name, n in self.results.items() if n in self._unknown}
        return Trace(
            events,
            results,
            self.makers,
            changed,
            tuple(self.memory.overlaps),
            error,
            unknown,
            tuple(self._not_finite),
        )


def _arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, communicates: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that the operation reads, and those that it writes."""
    if communicates or name.startswith(UNDECLARED):
        every = tensors_in([list(args), dict(kwargs)])
        return every, every
    read: list[Tensor] = []
    written: list[Tensor] = []
    schema = func._schema.arguments
    for position, argument in enumerate(schema):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        tensors = tensors_in(given)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes:
            written += tensors
        only_written = writes and (argument.is_out or (position == 0 and name in WHOLE))
        if not only_written and not (writes and name in ALLOCATING):
            read += tensors
    return read, written


def _is_view(func: Any) -> bool:
    """Return whether every result is a view of an argument, and nothing is written."""
    returns = func._schema.returns
    return bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )


def _storage(tensor: Tensor) -> int:
    try:
        return int(with_memory(tensor).untyped_storage()._cdata)
    except (NoValuesError, RuntimeError, NotImplementedError):
        return id(tensor)


def _has_operations(kind: type) -> bool:
    """Return whether a subclass of Tensor computes by operations on its inner tensors."""
    method = getattr(kind, "__torch_dispatch__", None)
    return (
        kind not in (Tensor, nn.Parameter)
        and method is not None
        and method is not torch._C._disabled_torch_dispatch_impl
    )


def _source() -> str:
    """Return file:line of the caller's code that runs now."""
    lines = call_stack()
    if not lines:
        return ""
    path, _, rest = lines[0].removeprefix("File ").partition(", line ")
    return f"{os.path.basename(path)}:{rest.partition(',')[0]}"


def _module_names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    return {
        id(part): ".".join(filter(None, (name, path))) or type(part).__name__
        for name, module in modules.items()
        for path, part in module.named_modules()
    }


def _parameter_names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    return {
        id(value): ".".join(filter(None, (name, path)))
        for name, module in modules.items()
        for path, value in module.named_parameters()
    }
