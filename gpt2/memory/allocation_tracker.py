"""Every allocation of a piece of work, one by one: when, in which phase, by which module, until when.

One mechanism for real tensors and for fake ones: a dispatch mode sees each operation's results, and a weak
reference to each storage tells when it goes. What a kernel takes and gives back inside itself never passes the
dispatcher; `workspace` may add it.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("parameters", "optimizer state", "gradients", "activations", "temporaries", "other")
SCALAR, NONZERO = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default
ADD = torch.ops.aten.add.Tensor
# What runs outside every module of the model: before its last norm, and after.
OUTSIDE = {"": "embeddings", "norm": "head and loss"}

Workspace = Callable[[Any, tuple[Any, ...]], int]


@dataclass(eq=False)
class Block:
    """One storage. born, died: positions on the tracker's clock of events (died None: alive at the end)."""

    nbytes: int
    born: int
    phase: str
    module: str
    died: int | None = None
    kind: str = ""
    outlived: bool = False  # its phase

    def label(self) -> str:
        """Its kind: the one it was marked with, else by its life; what forward leaves behind are activations."""
        if self.kind:
            return self.kind
        if not self.phase:
            return "other"
        return "activations" if self.phase == "forward" and self.outlived else "temporaries"


@dataclass
class Timeline:
    """What a tracker saw: all blocks, and the phases as (name, first event, last event)."""

    blocks: list[Block]
    phases: list[tuple[str, int, int]]
    events: int
    _curve: list[int] = field(default_factory=list, repr=False)

    def curve(self) -> list[int]:
        """Bytes alive after each event."""
        if not self._curve:
            steps = [0] * (self.events + 1)
            for block in self.blocks:
                steps[block.born] += block.nbytes
                if block.died is not None:
                    steps[block.died] -= block.nbytes
            total = 0
            for step in steps:
                total += step
                self._curve.append(total)
        return self._curve

    def alive(self, event: int) -> list[Block]:
        return [b for b in self.blocks if b.born <= event and (b.died is None or b.died > event)]

    def peak_event(self, phases: Iterable[str] | None = None) -> int:
        """The first event with the most bytes alive, in the phases named (default: in any phase)."""
        wanted = None if phases is None else set(phases)
        spans = [(a, b) for name, a, b in self.phases if wanted is None or name in wanted]
        curve = self.curve()
        return max((e for a, b in spans for e in range(a, b + 1)), key=lambda event: (curve[event], -event))

    def peak_bytes(self, phases: Iterable[str] | None = None) -> int:
        return self.curve()[self.peak_event(phases)]

    def by_phase(self) -> dict[str, int]:
        """Peak bytes of each phase, in the order of their first appearance."""
        return {name: self.peak_bytes([name]) for name in dict.fromkeys(name for name, _, _ in self.phases)}

    def by_kind(self, event: int) -> dict[str, int]:
        """Bytes alive at an event by kind; they add up to the total."""
        sums = dict.fromkeys(KINDS, 0)
        for block in self.alive(event):
            sums[block.label()] += block.nbytes
        return sums

    def by_kind_over_time(self) -> dict[str, list[int]]:
        """Bytes alive by kind after each event."""
        series = {kind: [0] * (self.events + 2) for kind in KINDS}
        for block in self.blocks:
            row = series[block.label()]
            row[block.born] += block.nbytes
            if block.died is not None:
                row[block.died] -= block.nbytes
        return {kind: list(itertools.accumulate(row)) for kind, row in series.items()}

    def by_module(self, event: int) -> list[tuple[str, str, int]]:
        """(module, kind, bytes) alive at an event, largest first; a `*` stands for all layers."""
        sums: dict[tuple[str, str], int] = {}
        for block in self.alive(event):
            key = (re.sub(r"\.\d+\b", ".*", block.module), block.label())
            sums[key] = sums.get(key, 0) + block.nbytes
        return sorted(((m, k, n) for (m, k), n in sums.items()), key=lambda row: -row[2])

    def phase_at(self, event: int) -> str:
        return next((name for name, a, b in self.phases if a <= event <= b), "")


class Tracker(TorchDispatchMode):
    """Enter it once, before the tensors are made (inside a FakeTensorMode, where one is wanted).

    granularity: bytes that an allocation is rounded up to. workspace(operation, arguments): bytes that its kernel
    takes besides its results, for as long as it runs. A number read from a fake tensor (`item`) is 0, and `nonzero`
    of one finds every element: the most that it can find.

    Gradients that reach a tensor by several ways are added into the first one's memory by autograd, but not while it
    is watched (torch's input_buffer.cpp, can_accumulate_inplace): such a sum is counted as if it were not.
    """

    def __init__(self, granularity: int = 1, workspace: Workspace | None = None) -> None:
        super().__init__()
        self.granularity, self.workspace = granularity, workspace
        self.blocks: list[Block] = []
        self.phases: list[tuple[str, int, int]] = []
        self._live: dict[int, tuple[Block, int, weakref.ref]] = {}  # by storage
        self._clock = 0
        self._phase = ""
        self._modules: list[str] = []
        self._outside = self._differentiated = OUTSIDE[""]
        self._spans: list[
            tuple[int, str]
        ] = []  # autograd's sequence number from which on a module made the nodes
        self._node: tuple[int | None, int] = (None, 0)  # autograd's node at work, and when it began
        self._sum: tuple[int, Block, int] | None = None  # when, the first gradient, the storage of the sum

    # -- what happens -------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # asks a fake tensor for its device and the like
            return func(*args, **(kwargs or {}))
        self._note_node()
        if func in (SCALAR, NONZERO) and isinstance(args[0], FakeTensor):
            out = _answer(func, args[0])
        else:
            out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        if func is ADD:
            self._note_sum(args[0], out)
        extra = self.workspace(func, args) if self.workspace else 0
        if extra:
            self._free(self._add(extra))
        return out

    def _see(self, tensor: Tensor) -> Block:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known and known[1] == nbytes:
            return known[0]
        if known:  # resized in place
            self._gone(key)
        block = self._add(nbytes)
        self._live[key] = (block, nbytes, weakref.ref(storage, lambda _: self._gone(key)))
        return block

    def _add(self, nbytes: int) -> Block:
        self._clock += 1
        rounded = -(-nbytes // self.granularity) * self.granularity
        block = Block(rounded, self._clock, self._phase, self.module())
        self.blocks.append(block)
        return block

    def _free(self, block: Block) -> None:
        self._clock += 1
        block.died = self._clock

    def _gone(self, key: int) -> None:
        block = self._live.pop(key)[0]
        if self._sum and self._sum[:2] == (self._clock, block):  # nobody else held it when the sum was made
            self._in_place(block, self._sum[2])
        else:
            self._free(block)

    def _note_node(self) -> None:
        node = torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        if number != self._node[0]:
            self._node = (number, self._clock)

    def _note_sum(self, first: Any, out: Tensor) -> None:
        """Remember a sum that autograd may have made of two gradients: the first is not of the node at work."""
        number, since = self._node
        if number is None or torch.is_grad_enabled() or not _dense(first):
            return
        block = self._live[first.untyped_storage()._cdata][0]
        if block.born <= since:
            self._sum = (self._clock, block, out.untyped_storage()._cdata)

    def _in_place(self, block: Block, key: int) -> None:
        """The sum has been in the block all along."""
        self.blocks.pop()
        self._clock -= 1
        self._sum = None
        self._live[key] = (block, *self._live[key][1:])

    # -- what it belongs to -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Events within belong to the phase; the same interface as gpt2.train.peak_memory.PeakMeter's."""
        self._phase, first = name, self._clock
        if name != "backward":
            self._outside = OUTSIDE[""]
            self._span()
        try:
            yield
        finally:
            for block, _, _ in self._live.values():
                block.outlived |= block.born > first
            self.phases.append((name, first + 1, max(self._clock, first + 1)))
            self._clock = max(self._clock, first + 1)
            self._phase = ""

    def module(self) -> str:
        """The module at work: in backward, the one whose forward made the node that is being differentiated."""
        if self._modules:
            return self._modules[-1]
        if self._phase == "optimizer":
            return "optimizer"
        node = torch._C._current_autograd_node()
        if node is None:
            return self._outside
        if not node.name().endswith("AccumulateGrad"):  # that one stands for a parameter and comes last
            at = bisect.bisect_right(self._spans, (node._sequence_nr(), "\U0010ffff"))
            self._differentiated = self._spans[at - 1][1] if at else self._outside
        return self._differentiated

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Tell the modules of `model` apart, by name, within the block."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda m, x, name=name: self._enter(name)))
            handles.append(
                module.register_forward_hook(lambda m, x, y, name=name: self._leave(name), always_call=True)
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> None:
        self._modules.append(name)
        self._span()

    def _leave(self, name: str) -> None:
        self._modules.pop()
        self._outside = OUTSIDE.get(name, self._outside)
        self._span()

    def _span(self) -> None:
        name = self._modules[-1] if self._modules else self._outside
        self._spans.append((torch._C._autograd._get_sequence_nr(), name))

    def mark(self, kind: str, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        """Say what (module, tensor) pairs are; those not seen before count from now on."""
        for module, tensor in tensors:
            if tensor is not None:
                block = self._see(tensor)
                block.kind, block.module = kind, module

    def timeline(self) -> Timeline:
        return Timeline(self.blocks, self.phases, self._clock)

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._live.clear()  # and with it the references that would tell of what is freed later


def _dense(tensor: Tensor) -> bool:
    """Every element at a place of its own and no gaps, in whatever order."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def _answer(func: Any, fake: Tensor) -> Any:
    if func is NONZERO:
        return fake.new_empty((fake.numel(), fake.dim()), dtype=torch.int64)
    return False if fake.dtype == torch.bool else 0.0 if fake.is_floating_point() else 0


class PhaseMarks:
    """Passed to Stepper.step as its meter: marks the gradients and the optimizer's state where a phase ends."""

    def __init__(self, tracker: Tracker, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.tracker, self.model, self.optimizer = tracker, model, optimizer
        self.names: dict[Tensor, str] = {p: name.rpartition(".")[0] for name, p in model.named_parameters()}
        tracker.mark("parameters", ((name, p) for p, name in self.names.items()))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.tracker.phase(name):
            yield
            if name == "backward":
                self.tracker.mark("gradients", ((module, p.grad) for p, module in self.names.items()))
            if name == "optimizer":
                for p, state in self.optimizer.state.items():
                    tensors = [value for value in state.values() if isinstance(value, Tensor)]
                    self.tracker.mark("optimizer state", ((self.names[p], tensor) for tensor in tensors))
