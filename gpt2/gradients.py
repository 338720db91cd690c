"""Sum gradients over micro-batches and ranks, in the order of the ranks' library.

Sums of floats depend on their order, so another number of ranks gives other rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from runtime import ranks

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


BUCKET_BYTES = 64 * 2**20  # of gradients that are exchanged at once, and copied for it


def accumulate(
    backward: Callable[[int], Tensor], count: int, parameters: Sequence[Tensor], world: int = 1
) -> Tensor:
    """Call backward(number) for each of `count` micro-batches, which adds to `.grad`; return the sum of its losses.

    world: ranks that this process stands for, in a replay. Above 1 the sums are those of so many ranks followed by
    `sum_over_ranks`, to the bit on a CPU; this needs world + 1 times the memory of the gradients.
    """
    if world == 1:
        total = backward(0)
        for number in range(1, count):
            total += backward(number)
        return total
    each = count // world
    totals: list[Tensor] = []
    found: list[list[Tensor | None]] = []
    for first in range(0, count, each):
        totals.append(accumulate(lambda number, first=first: backward(first + number), each, parameters))  # type: ignore[misc]
        found.append([parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
    used = [k for k, of_ranks in enumerate(zip(*found, strict=True)) if any(g is not None for g in of_ranks)]
    for of_rank in found:
        for k in used:
            of_rank[k] = torch.zeros_like(parameters[k]) if of_rank[k] is None else of_rank[k]
    with rank_sums(world) as add:
        _sum_in_buckets([[total] for total in totals], add)
        _sum_in_buckets([[g for g in of_rank if g is not None] for of_rank in found], add)
    for parameter, gradient in zip(parameters, found[0], strict=True):
        parameter.grad = gradient
    return totals[0]


def sum_over_ranks(parameters: Sequence[Tensor], total: Tensor) -> None:
    """Replace each gradient and `total` by the sum over the ranks, in place. A gradient that no rank has stays None."""
    if ranks.world() == 1:
        return
    exists = ranks.agree(*[parameter.grad is not None for parameter in parameters])
    for parameter, found in zip(parameters, exists, strict=True):
        if found and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)

    def add(parts: list[Tensor]) -> Tensor:
        torch.distributed.all_reduce(parts[0])
        return parts[0]

    with ranks.exchange():
        _sum_in_buckets([[total]], add)
        _sum_in_buckets([[p.grad for p in parameters if p.grad is not None]], add)


def _sum_in_buckets(of_ranks: Sequence[list[Tensor]], add: Sum) -> None:
    """Replace the tensors of the first rank by `add` of those of every rank that this process has."""
    for buckets in zip(*map(_buckets, of_ranks), strict=True):
        flat = add([_flatten_dense_tensors(bucket) for bucket in buckets])
        for tensor, summed in zip(buckets[0], _unflatten_dense_tensors(flat, buckets[0]), strict=True):
            tensor.copy_(summed)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield consecutive gradients of one dtype, of at most BUCKET_BYTES unless a single one is larger."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or size + gradient.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
