"""Track every allocation of a piece of work: when, in which phase, of which kind, and until when.

Real and fake tensors use one mechanism: a dispatch mode sees the results of each operation, and a weak reference to
each storage reports its release. Memory that a kernel allocates and frees inside itself never passes the dispatcher;
`workspace` can add it.
"""

from __future__ import annotations

import contextlib
import itertools
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

Workspace = Callable[[Any, tuple[Any, ...]], int]


@dataclass(eq=False)
class Allocation:
    """One storage. allocated_at, freed_at: event numbers (freed_at None: alive at the end).

    survived_phase: whether the storage outlived the phase that allocated it.
    """

    nbytes: int
    allocated_at: int
    phase: str
    freed_at: int | None = None
    kind: str = ""
    survived_phase: bool = False

    def label(self) -> str:
        """Return the marked kind, else one inferred from the lifetime: forward's survivors are activations."""
        if self.kind:
            return self.kind
        if not self.phase:
            return "other"
        return "activations" if self.phase == "forward" and self.survived_phase else "temporaries"


@dataclass
class Timeline:
    """Recorded allocations, and phases as (name, first event, last event)."""

    blocks: list[Allocation]
    phases: list[tuple[str, int, int]]
    events: int
    _curve: list[int] = field(default_factory=list, repr=False)

    def curve(self) -> list[int]:
        """Return the bytes alive after each event."""
        if not self._curve:
            changes = [0] * (self.events + 1)
            for block in self.blocks:
                changes[block.allocated_at] += block.nbytes
                if block.freed_at is not None:
                    changes[block.freed_at] -= block.nbytes
            self._curve = list(itertools.accumulate(changes))
        return self._curve

    def alive(self, event: int) -> list[Allocation]:
        """Return the allocations alive after an event."""
        return [
            b for b in self.blocks if b.allocated_at <= event and (b.freed_at is None or b.freed_at > event)
        ]

    def peak_event(self, phases: Iterable[str] | None = None) -> int:
        """Return the first event with the most bytes alive in the named phases (default: in any phase)."""
        wanted = {name for name, _, _ in self.phases} if phases is None else set(phases)
        events = sorted({e for name, a, b in self.phases if name in wanted for e in range(a, b + 1)})
        return max(events, key=self.curve().__getitem__)

    def peak_bytes(self, phases: Iterable[str] | None = None) -> int:
        """Return the most bytes alive in the named phases (default: in any phase)."""
        return self.curve()[self.peak_event(phases)]

    def by_phase(self) -> dict[str, int]:
        """Return each phase's peak bytes, in order of first appearance."""
        return {name: self.peak_bytes([name]) for name in dict.fromkeys(name for name, _, _ in self.phases)}

    def by_kind(self, event: int) -> dict[str, int]:
        """Return the bytes alive at an event by kind. They sum to the total."""
        sums = dict.fromkeys(KINDS, 0)
        for block in self.alive(event):
            sums[block.label()] += block.nbytes
        return sums

    def phase_at(self, event: int) -> str:
        """Return the phase of an event, "" outside every phase."""
        return next((name for name, a, b in self.phases if a <= event <= b), "")


class AllocationTracker(TorchDispatchMode):
    """Dispatch mode that records allocations. Enter it once, before the tensors exist (inside any FakeTensorMode).

    granularity: allocations are rounded up to this many bytes. workspace(operation, arguments): bytes that the
    operation's kernel holds besides its results while it runs. Reading a number from a fake tensor (`item`) gives 0;
    `nonzero` of a fake tensor finds every element, the maximum.

    Autograd adds gradients that reach a tensor by several paths in place, but not inside a dispatch mode (torch's
    input_buffer.cpp, can_accumulate_inplace). The tracker counts such a sum as in place.
    """

    def __init__(self, granularity: int = 1, workspace: Workspace | None = None) -> None:
        super().__init__()
        self.granularity, self.workspace = granularity, workspace
        self.blocks: list[Allocation] = []
        self.phases: list[tuple[str, int, int]] = []
        self._live: dict[int, tuple[Allocation, int, weakref.ref[torch.UntypedStorage]]] = {}  # by storage
        self._clock = 0
        self._phase = ""
        self._node: tuple[int | None, int] = (None, 0)  # (current autograd node, event at which it began)
        self._sum: tuple[int, Allocation, int] | None = None  # (event, first gradient, storage of the sum)

    # -- allocations --------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # metadata queries of fake tensors
            return func(*args, **(kwargs or {}))
        self._note_backward_node()
        if func in (SCALAR, NONZERO) and isinstance(args[0], FakeTensor):
            out = _fake_result(func, args[0])
        else:
            out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._record(leaf)
        if func is ADD:
            self._note_gradient_sum(args[0], out)
        extra = self.workspace(func, args) if self.workspace else 0
        if extra:
            self._free(self._add(extra))
        return out

    def _record(self, tensor: Tensor) -> Allocation:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known and known[1] == nbytes:
            return known[0]
        if known:  # resized in place
            self._on_free(key)
        block = self._add(nbytes)
        self._live[key] = (block, nbytes, weakref.ref(storage, lambda _: self._on_free(key)))
        return block

    def _add(self, nbytes: int) -> Allocation:
        self._clock += 1
        rounded = -(-nbytes // self.granularity) * self.granularity
        block = Allocation(rounded, self._clock, self._phase)
        self.blocks.append(block)
        return block

    def _free(self, block: Allocation) -> None:
        self._clock += 1
        block.freed_at = self._clock

    def _on_free(self, key: int) -> None:
        block = self._live.pop(key)[0]
        if self._sum and self._sum[:2] == (self._clock, block):  # no other reference existed at the sum
            self._count_in_place(block, self._sum[2])
        else:
            self._free(block)

    def _note_backward_node(self) -> None:
        node = torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        if number != self._node[0]:
            self._node = (number, self._clock)

    def _note_gradient_sum(self, first: Any, out: Tensor) -> None:
        """Remember a sum that autograd may make in place: the first gradient comes from an earlier node."""
        number, since = self._node
        if number is None or torch.is_grad_enabled() or not _dense(first):
            return
        block = self._live[first.untyped_storage()._cdata][0]
        if block.allocated_at <= since:
            self._sum = (self._clock, block, out.untyped_storage()._cdata)

    def _count_in_place(self, block: Allocation, key: int) -> None:
        """Count the sum as in place: drop its own allocation."""
        self.blocks.pop()
        self._clock -= 1
        self._sum = None
        self._live[key] = (block, *self._live[key][1:])

    # -- phases and kinds ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Assign the events of the block to the phase. Same interface as gpt2.measured_memory.PeakMeter."""
        self._phase, first = name, self._clock
        try:
            yield
        finally:
            for block, _, _ in self._live.values():
                block.survived_phase |= block.allocated_at > first
            self.phases.append((name, first + 1, max(self._clock, first + 1)))
            self._clock = max(self._clock, first + 1)
            self._phase = ""

    def mark(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Set the kind of tensors; a new tensor counts from this event on."""
        for tensor in tensors:
            if tensor is not None:
                self._record(tensor).kind = kind

    def timeline(self) -> Timeline:
        """Return the events recorded so far."""
        return Timeline(self.blocks, self.phases, self._clock)

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._live.clear()  # drops the weak references: later frees are not recorded


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in any order."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def _fake_result(func: Any, fake: Tensor) -> Any:
    """Return what `item` and `nonzero` of a fake tensor give: 0, or every element."""
    if func is NONZERO:
        return fake.new_empty((fake.numel(), fake.dim()), dtype=torch.int64)
    return False if fake.dtype == torch.bool else 0.0 if fake.is_floating_point() else 0


class PhaseMarks:
    """Meter for Stepper.step: marks gradients and optimizer state at the end of their phases."""

    def __init__(
        self, tracker: AllocationTracker, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.tracker, self.model, self.optimizer = tracker, model, optimizer
        tracker.mark("parameters", model.parameters())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Track the phase, then mark the tensors that it created."""
        with self.tracker.phase(name):
            yield
            if name == "backward":
                self.tracker.mark("gradients", (p.grad for p in self.model.parameters()))
            if name == "optimizer":
                states = [value for state in self.optimizer.state.values() for value in state.values()]
                self.tracker.mark("optimizer state", (x for x in states if isinstance(x, Tensor)))
