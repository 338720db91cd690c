"""Observe the gradients at the inputs and outputs of one call, without a change to the graph.

The hooks of torch's modules insert identity nodes, which forbids in-place operations on their views. Here the call's
part of the graph is walked from its outputs to its inputs, and its nodes report what passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

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
