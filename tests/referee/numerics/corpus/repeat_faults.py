"""Faults that two records share or call rounding: a repetition of the step names the cause."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from referee.numerics.repeat import repeat_evidence as causes
from tests.referee.numerics.corpus.answers import repeated
from tests.referee.numerics.corpus.cases import Corpus, RunFault, Side, agree
from tests.referee.numerics.corpus.changes import Parts, wrap
from tests.referee.numerics.corpus.faults import ADAMW
from tests.referee.numerics.corpus.models import IDS, MAKERS, OURS, loss_of
from tests.referee.numerics.corpus.oracle_faults import FaultyDevice

MODULE, PLACE = "fc", "blocks.1.mlp.fc"  # that the faults are in


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


def repeat(
    change: Callable[[Parts], None] | None, around: AbstractContextManager[Any]
) -> tuple[str, str, str] | None:
    """Repeat a step of the small model with AdamW. Returns the answer of `repeated`."""
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
        return repeated(step, {"model": model, "optimizer": optimizer})


def _fault(
    name: str,
    cause: str,
    operation: str,
    change: Callable[[Parts], None],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    guide: str = "",
) -> RunFault:
    """Return a fault. Right: the cause, and a part of the name of the first operation that differs, in PLACE."""

    def answer(corpus: Corpus) -> tuple[bool, str]:
        found = repeat(change, around()) or ("reproducible", "", "")
        right = (found[0], found[2]) == (cause, PLACE) and operation in found[1]
        return right and agree(corpus, Side(change, around=around)), ", ".join(found)

    return RunFault(name, "repeat", f"{cause}, {operation}", answer, guide)


REPEAT_FAULTS = (
    _fault(
        "unordered scatter-add",
        causes.NOT_DETERMINISTIC,
        "scatter_add_unordered",
        unordered,
        guide="3.2.2.2",
    ),
    _fault("uninitialised buffer", causes.UNINITIALISED, "aten.mean", uninitialised, calm_memory),
    _fault("two tensors in one memory", causes.UNOBSERVED_WRITE, "aten.mul", shared, guide="3.2.2.1"),
)
