"""Observe the calls of torch's functions and tensor methods: their names, and whether they compute a value."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode, resolve_name

from referee.numerics.describe import tensors_in

PREFIXES = {"torch.nn.functional.": "Functional.", "torch.Tensor.": "Tensor.", "torch.": "Torch."}
SILENT = {"backward", "requires_grad_", "register_hook", "retain_grad", "detach", "detach_", "zero_", "set_"}
DRAWING = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "trunc_normal_"}
OVERWRITING = {"copy_", "fill_", *DRAWING}
# Their content is arbitrary.
UNSET = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# torch gives x + y and x.add(y) one name; msProbe's is that of the operator.
OPERATORS = {"div": "__truediv__", "remainder": "__mod__"}
OPERATORS |= {name: f"__{name}__" for name in ("add", "sub", "mul", "matmul", "gt", "ge", "lt", "le", "ne")}
OPERATORS |= {f"{name}_": f"__i{name}__" for name in ("add", "sub", "mul")}
DEEPEST_STACK = 12  # frames
HERE = str(Path(__file__).parents[1])


class FunctionCalls(TorchFunctionMode):
    """Report the calls of torch's functions and of tensor methods to a Recorder."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        label = _label(func) if self.recorder.recording() else ""
        if not label:
            return func(*args, **kwargs)
        before = tensors_in([list(args), kwargs])
        call = self.recorder.open_call(label, "{}.forward", (tuple(args), kwargs))
        output = func(*args, **kwargs)
        made = tensors_in(output)
        name = label.rpartition(".")[2]
        in_place = (name[-1:] == "_" != name[-2:-1]) or name.startswith("__i") or "out" in kwargs
        computes = in_place or not all(_is_view(tensor, before) for tensor in made)
        if call.recorded and not (made and computes):
            self.recorder.forget(call)
        else:
            self.recorder.close_call(call, output)
        return output


def _is_view(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Return whether the tensor has the memory of one of the others: a view has their content."""
    place = _storage(tensor)
    return bool(place and tensor.numel()) and place in map(_storage, others)


def _storage(tensor: Tensor) -> int | None:
    """Return the address of the tensor's memory; None where it has none: meta, sparse, nested, functorch's."""
    try:
        return None if tensor.is_meta else tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None


def _label(func: Any) -> str:
    """Return the name of a torch function, as in "Functional.linear"; empty for one that is not recorded."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__") or name in SILENT | UNSET:
        return ""
    full = resolve_name(func)
    if not full:
        return f"Torch.{name}" if name else ""
    prefix = next((prefix for prefix in PREFIXES if full.startswith(prefix)), "")
    name = str(full).removeprefix(prefix)
    if prefix == "torch.Tensor.":
        name = OPERATORS.get(name, name)
    return PREFIXES.get(prefix, "Torch.") + name


def without_overwritten(label: str, args: Sequence[Any]) -> list[Any]:
    """Return the arguments, without the content of one that the function only overwrites."""
    given = list(args)
    if label.rpartition(".")[2] in OVERWRITING and given and isinstance(given[0], Tensor):
        given[0] = torch.empty_like(given[0], device="meta")
    return given


def call_stack() -> list[str]:
    """Return the callers, innermost first, without those in torch and in this package."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < DEEPEST_STACK:
        path = frame.f_code.co_filename
        if not path.startswith(HERE) and f"{os.sep}torch{os.sep}" not in path:
            lines.append(f"File {path}, line {frame.f_lineno}, in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines


Report = Callable[[str, int, Tensor], None]
SEVERAL = (
    "several backward passes reached one call, as with retain_graph: its gradients are those of the first"
)
WITHIN_CHECKPOINT = (
    "the gradients of calls within torch.utils.checkpoint with use_reentrant=True are not recorded; a difference that "
    "arises in their backward is named at the next recorded gradient; fix: use_reentrant=False"
)


def recomputes() -> bool:
    """Whether backward runs the present forward, as for torch.utils.checkpoint."""
    return torch._C._current_graph_task_id() != -1


def in_reentrant_checkpoint() -> bool:
    """Whether backward recomputes a checkpoint with use_reentrant=True, whose gradients pass in a separate backward."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "CheckpointFunctionBackward"


def sequence_number() -> int:
    """Return the number that autograd gives to the next node of this thread."""
    return int(torch._C._autograd._get_sequence_nr())


class GradientWatch:
    """Report the gradients of one call, of the first backward pass that reaches it.

    report("input", index, gradient): of the call's output `index`, which backward receives.
    report("output", index, gradient): of the call's input `index`, summed over its uses within the call.
    begin: `sequence_number()` before the call. Nodes of before are outside. note: receives SEVERAL.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        begin: int,
        report: Report,
        note: Callable[[str], None],
    ) -> None:
        self.report, self.note = report, note
        self.first_pass: int | None = None
        self.sums: dict[int, Tensor] = {}
        self.missing: dict[int, int] = {}  # input -> uses whose gradient has not arrived
        starts = []
        for index, tensor in enumerate(outputs):
            if tensor.requires_grad:
                node, number = get_gradient_edge(tensor)[:2]
                if not _is_leaf(node):
                    node.register_prehook(self._receive(index, number))
                    starts.append(node)
        ends: dict[tuple[Any, int], int] = {}
        for index, tensor in enumerate(inputs):
            if tensor.requires_grad:
                node, number = get_gradient_edge(tensor)[:2]
                ends.setdefault((node, number), index)
        self.kept = [node for node, _ in ends]  # a wrapper that is freed has another identity afterwards
        self._walk(starts, ends, begin)

    def _walk(self, starts: list[Any], ends: dict[tuple[Any, int], int], begin: int) -> None:
        todo, visited = list(starts), set(starts)
        while todo:
            node = todo.pop()
            if node._sequence_nr() < begin:
                continue  # the call returned one of its inputs
            uses = []
            for slot, (following, number) in enumerate(node.next_functions):
                if following is None:
                    continue
                outside = _is_leaf(following) or following._sequence_nr() < begin
                index = ends.get((following, number))
                if index is not None and outside:
                    uses.append((slot, index))
                    self.missing[index] = self.missing.get(index, 0) + 1
                elif not outside and following not in visited:
                    visited.add(following)
                    todo.append(following)
            if uses:
                node.register_hook(self._pass_on(uses))

    def _is_first_pass(self) -> bool:
        now = torch._C._current_graph_task_id()
        if self.first_pass is None:
            self.first_pass = now
        if now != self.first_pass:
            self.note(SEVERAL)
        return now == self.first_pass

    def _receive(self, index: int, number: int) -> Callable[[Any], None]:
        def hook(gradients: Sequence[Tensor | None]) -> None:
            gradient = gradients[number]
            if gradient is not None and self._is_first_pass():
                self.report("input", index, gradient)

        return hook

    def _pass_on(self, uses: list[tuple[int, int]]) -> Callable[[Any, Any], None]:
        def hook(passed: Sequence[Tensor | None], received: Any) -> None:
            if not self._is_first_pass():
                return
            for slot, index in uses:
                self.missing[index] -= 1
                gradient = passed[slot]
                if gradient is not None:
                    before = self.sums.pop(index, None)
                    self.sums[index] = gradient if before is None else before + gradient
                if not self.missing[index] and index in self.sums:
                    self.report("output", index, self.sums.pop(index))

        return hook


def _is_leaf(node: Any) -> bool:
    return bool(node.name() == "torch::autograd::AccumulateGrad")
