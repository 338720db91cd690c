"""Sum tensors in one process in the order in which the ranks of a run sum them, to replay a run of several ranks.

On the CPU gloo sums, among threads. Two ranks need none, since a + b = b + a. The order of an accelerator's library is
unknown: its tensors are summed in the order of the ranks, and a replay differs from the run by rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

Sum = Callable[[list[Tensor]], Tensor]
PATIENCE = timedelta(seconds=600)


@contextlib.contextmanager
def rank_sums(world: int) -> Iterator[Sum]:
    """Yield a function that returns the sum of `world` tensors of one shape and dtype, as new memory."""
    if world <= 2 or not torch.distributed.is_available():
        yield _in_order
        return
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]

    def join(rank: int) -> Any:
        return torch.distributed.ProcessGroupGloo(store, rank, world, PATIENCE)

    with ThreadPoolExecutor(world) as pool:
        groups = list(pool.map(join, range(world)))

        def add(parts: list[Tensor]) -> Tensor:
            if parts[0].device.type != "cpu":
                return _in_order(parts)

            def reduce(rank: int) -> Tensor:
                summed = parts[rank].clone()
                groups[rank].allreduce([summed]).wait()
                return summed

            first, *_ = pool.map(reduce, range(world))
            return first

        yield add


def _in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
