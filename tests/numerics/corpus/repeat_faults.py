"""Faults that a comparison of two runs does not name: two runs are equal or differ by rounding.

Repeating the step under several conditions, or stress of the devices, names the cause and the place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from numerics import repeat_step
from numerics.compare.run import compare_records
from numerics.repeat import conclude
from numerics.repeat.corruption import ROUNDING
from numerics.repeat.report import Repetition
from tests.numerics.corpus.changes import Parts, wrap
from tests.numerics.corpus.corpus import Answer, record_run
from tests.numerics.corpus.faults import ADAMW, CHECKSUMS, PairSide
from tests.numerics.corpus.models import IDS, MAKERS, OURS, loss_of
from tests.numerics.corpus.oracle_faults import FaultyDevice

MODULE = "fc"  # that the faults are in
PLACE = "blocks.1.mlp.fc"


@dataclass(frozen=True)
class RepeatFault:
    """expected: the conclusion. operation: a part of the name of the first operation that differs.

    change: of the model; None for a fault of a device. around: the context of recorded and repeated steps.
    """

    name: str
    expected: str
    operation: str
    change: Callable[[Parts], None] | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    case: str = ""

    @property
    def answer(self) -> str:
        return f"{self.expected}, {self.operation}"


@torch.library.custom_op("bench_numerics::scatter_add_unordered", mutates_args=())
def scatter_add_unordered(x: Tensor) -> Tensor:
    """Add eight parts of each element in an order that changes from call to call, as atomic additions do."""
    _calls.append(len(_calls))
    total = torch.zeros_like(x)
    for part in torch.randperm(8, generator=torch.Generator().manual_seed(_calls[-1])).tolist():
        total += x * (0.1 + 0.03 * part)
    return total


_calls: list[int] = []
scatter_add_unordered.register_autograd(lambda ctx, received: received * 1.64)


def unordered(parts: Parts) -> None:
    wrap(parts[MODULE], lambda forward, x: scatter_add_unordered(forward(x)))


def uninitialised(parts: Parts) -> None:
    """Read one row more than was written."""

    def around(forward: Any, x: Tensor) -> Tensor:
        y: Tensor = forward(x)
        buffer = torch.empty(len(y) + 1, *y.shape[1:])
        buffer[:-1] = y.detach()
        return y + 1e-3 * buffer.mean(0)

    wrap(parts[MODULE], around)


def calm_memory() -> FaultyDevice:
    """Return new memory with zeros, as it often is at the start of a process."""
    return FaultyDevice({"empty": lambda *args, **kwargs: torch.ops.aten.empty(*args, **kwargs).zero_()})


def shared(parts: Parts) -> None:
    """Give two buffers offsets in one memory that overlap, as a wrong allocator does."""

    def around(forward: Any, x: Tensor) -> Tensor:
        y: Tensor = forward(x)
        size = y.numel()
        memory = np.zeros(2 * size, dtype=np.float32)
        kept, scratch = torch.from_numpy(memory[:size]), torch.from_numpy(memory[size - 512 :])
        with torch.no_grad():
            kept.copy_(y.detach().flatten())
            scratch.fill_(0.125)
        return y + 1e-3 * kept.view_as(y)

    wrap(parts[MODULE], around)


REPEAT_FAULTS = (
    RepeatFault(
        "unordered scatter-add",
        conclude.NOT_DETERMINISTIC,
        "scatter_add_unordered",
        unordered,
        case="3.2.2.2",
    ),
    RepeatFault("uninitialised buffer", conclude.UNINITIALISED, "aten.mean", uninitialised, calm_memory),
    RepeatFault("two tensors in one memory", conclude.SHARED, "aten.mul", shared, case="3.2.2.1"),
)


def answer(folder: Path, fault: RepeatFault) -> Answer:
    """Record two runs with the fault, and repeat the step. Right: no divergence, and the cause and its place."""
    first, second = (
        record_run(folder, PairSide(fault.change, around=fault.around), OURS, CHECKSUMS) for _ in range(2)
    )
    compared = compare_records(first, second).verdict
    right, words = _by_repetition(fault)
    return Answer(
        fault.name, OURS, CHECKSUMS, f"compare: {compared}; {words}", right and compared != "diverges"
    )


def repeat(change: Callable[[Parts], None] | None, around: AbstractContextManager[Any]) -> Repetition:
    """Repeat a step of the small model with AdamW."""
    model: Any = MAKERS[OURS](0)
    if change:
        change(Parts(OURS, model))
    optimizer = ADAMW(model)

    def step() -> Tensor:
        loss = loss_of(model, IDS[:, :-1], IDS[:, 1:])
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    with around:
        return repeat_step(step, {"model": model, "optimizer": optimizer}, times=3, threads=1)


def _by_repetition(fault: RepeatFault) -> tuple[bool, str]:
    found = repeat(fault.change, fault.around()).conclusion
    first = found.findings[0] if found.findings else None
    if first is None or first.operation is None:
        return False, found.name
    right = first.name == fault.expected and fault.operation in first.operation.name
    right = right and first.operation.place == PLACE
    if fault.expected == conclude.NOT_DETERMINISTIC:
        right = right and first.corruption is not None and first.corruption.change == ROUNDING
    return right, f"{first.name}: {first.operation.title}"
