"""Plan an exact batch: micro_batch x accumulation x world_size == effective batch, or an error.

Unit of every batch size: sequences of `block_size` tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from runtime.errors import UserError

WARM_UP_STEPS = 2  # of each process: kernels, allocator and caches settle; on the compile clock


class BatchError(UserError, ValueError):
    """The requested parts do not give the effective batch exactly."""


@dataclass(frozen=True)
class BatchPlan:
    """The parts of one optimizer step. BatchError where they do not multiply to `effective` exactly."""

    effective: int
    micro: int
    accumulation: int
    world_size: int
    block_size: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise BatchError(f"batch: {name} is {value}; fix: use at least 1")
        if self.micro * self.accumulation * self.world_size != self.effective:
            raise BatchError(
                f"effective batch {self.effective} is not micro {self.micro} x accumulation "
                f"{self.accumulation} x {self.world_size} processes"
            )

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of one optimizer step over all processes."""
        return self.accumulation * self.world_size

    @property
    def tokens(self) -> int:
        """Return the tokens of one optimizer step over all processes."""
        return self.effective * self.block_size


def micro_batches(effective: int, world_size: int) -> list[int]:
    """List the micro-batches that divide the effective batch exactly over `world_size` processes, ascending.

    BatchError where the processes cannot share the effective batch evenly.
    """
    if effective < 1 or world_size < 1:
        raise BatchError(
            f"effective batch {effective} over {world_size} processes; fix: use at least 1 of each"
        )
    if effective % world_size:
        raise BatchError(
            f"{world_size} processes cannot share effective batch {effective} evenly; fix: use "
            f"{(effective // world_size + 1) * world_size}"
        )
    share = effective // world_size
    small = [n for n in range(1, int(share**0.5) + 1) if share % n == 0]
    return sorted({*small, *(share // n for n in small)})


def plan_batch(effective: int, micro: int, world_size: int, block_size: int) -> BatchPlan:
    """Plan a given micro-batch. BatchError names the nearest micro-batches that work."""
    possible = micro_batches(effective, world_size)
    if micro not in possible:
        raise BatchError(
            f"effective batch {effective} is not micro {micro} x accumulation x {world_size} processes; "
            f"fix: use a micro-batch of {nearest(possible, micro)}"
        )
    return BatchPlan(effective, micro, effective // (micro * world_size), world_size, block_size)


def largest_micro_batch(effective: int, world_size: int, limit: int) -> int:
    """Return the largest exact micro-batch of at most `limit` sequences. BatchError where `limit` is below 1."""
    fitting = [n for n in micro_batches(effective, world_size) if n <= limit]
    if not fitting:
        raise BatchError(f"no micro-batch fits: the limit is {limit} sequences; the smallest is 1")
    return fitting[-1]


def next_smaller(plan: BatchPlan) -> BatchPlan | None:
    """Plan the same effective batch with the next smaller micro-batch; None where `micro` is 1."""
    smaller = [n for n in micro_batches(plan.effective, plan.world_size) if n < plan.micro]
    return plan_batch(plan.effective, smaller[-1], plan.world_size, plan.block_size) if smaller else None


def plan_for(plan: BatchPlan, world_size: int) -> BatchPlan:
    """Plan the same effective batch for `world_size` processes, with the largest micro-batch up to that of the plan."""
    if plan.world_size == world_size:
        return plan
    micro = largest_micro_batch(plan.effective, world_size, plan.micro)
    return plan_batch(plan.effective, micro, world_size, plan.block_size)


def nearest(possible: list[int], micro: int) -> str:
    """List the four possible micro-batches nearest to `micro`."""
    return ", ".join(map(str, sorted(sorted(possible, key=lambda n: abs(n - micro))[:4])))
