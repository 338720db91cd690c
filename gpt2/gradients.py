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

Gradients = list[Tensor | None]


def accumulate(backward: Callable[[int], Tensor], count: int) -> Tensor:
    """Call backward(number) for each micro-batch, which adds to `.grad`; return the sum of the losses it returns."""
    total = backward(0)
    for number in range(1, count):
        total += backward(number)
    return total


def accumulate_as_ranks(
    backward: Callable[[int], Tensor], count: int, parameters: Sequence[Tensor], world: int
) -> Tensor:
    """Do as `accumulate` on each of `world` ranks followed by `sum_over_ranks` does, in one process and to the bit.

    Needs world + 1 times the memory of the gradients. On accelerators sums differ by rounding (gpt2.gradients).
    """
    each = count // world
    totals: list[Tensor] = []
    found: list[Gradients] = []
    for rank in range(world):
        totals.append(accumulate(lambda number, first=rank * each: backward(first + number), each))  # type: ignore[misc]
        found.append([parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
    for number, parameter in enumerate(parameters):
        if any(of_rank[number] is not None for of_rank in found):
            for of_rank in found:
                of_rank[number] = torch.zeros_like(parameter) if of_rank[number] is None else of_rank[number]
    per_rank = [
        [total, *(one for one in of_rank if one is not None)]
        for total, of_rank in zip(totals, found, strict=True)
    ]
    with rank_sums(world) as add:
        summed: list[Tensor] = []
        for buckets in zip(*([[of_rank[0]], *_buckets(of_rank[1:])] for of_rank in per_rank), strict=True):
            flat = add([_flatten_dense_tensors(bucket) for bucket in buckets])
            summed += _unflatten_dense_tensors(flat, buckets[0])
    left = iter(summed[1:])
    for gradient, parameter in zip(found[0], parameters, strict=True):
        parameter.grad = None if gradient is None else gradient.copy_(next(left))  # memory of each gradient
    return summed[0]


def sum_over_ranks(parameters: Sequence[Tensor], total: Tensor) -> None:
    """Replace each gradient and `total` by the sum over the ranks, in place. A gradient that no rank has stays None."""
    if ranks.world() == 1:
        return
    exists = ranks.agree(*[parameter.grad is not None for parameter in parameters])
    for parameter, found in zip(parameters, exists, strict=True):
        if found and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with ranks.exchange():
        for bucket in [[total], *_buckets(gradients)]:
            flat = _flatten_dense_tensors(bucket)
            torch.distributed.all_reduce(flat)
            for gradient, summed in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                gradient.copy_(summed)


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
