"""The exact batch: micro_batch x accumulation x world_size == effective batch, or no run at all.

Units: every batch size is counted in sequences of `block_size` tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gpt2.system.errors import UserError


class BatchError(UserError, ValueError):
    """The effective batch cannot be made exactly from the parts that were asked for."""


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step is put together.

    Raises BatchError when the parts do not multiply to `effective` exactly.
    """

    effective: int
    micro: int
    accumulation: int
    world_size: int
    block_size: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise BatchError(f"batch: {name} is {value}; it must be at least 1")
        if self.micro * self.accumulation * self.world_size != self.effective:
            raise BatchError(
                f"effective batch {self.effective} is not micro {self.micro} x accumulation "
                f"{self.accumulation} x {self.world_size} processes"
            )

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step over all processes."""
        return self.effective * self.block_size


def micro_batches(effective: int, world_size: int) -> list[int]:
    """All micro-batches that divide the effective batch exactly over `world_size` processes, ascending.

    Raises BatchError where the effective batch cannot be shared out evenly at all.
    """
    if effective < 1 or world_size < 1:
        raise BatchError(f"effective batch {effective} over {world_size} processes; both must be at least 1")
    if effective % world_size:
        below = effective // world_size * world_size
        nearest = [n for n in (below, below + world_size) if n]
        raise BatchError(
            f"effective batch {effective} cannot be shared evenly by {world_size} processes; "
            f"nearest that can: {_listed(nearest)}"
        )
    share = effective // world_size
    small = [n for n in range(1, int(share**0.5) + 1) if share % n == 0]
    return sorted({*small, *(share // n for n in small)})


def plan_batch(effective: int, micro: int, world_size: int, block_size: int) -> BatchPlan:
    """The plan for a given micro-batch; BatchError names the nearest micro-batches that work."""
    possible = micro_batches(effective, world_size)
    if micro not in possible:
        nearest = sorted(sorted(possible, key=lambda n: abs(n - micro))[:4])
        raise BatchError(
            f"effective batch {effective} is not micro {micro} x accumulation x {world_size} processes; "
            f"nearest micro-batches that work: {_listed(nearest)}"
        )
    return BatchPlan(effective, micro, effective // (micro * world_size), world_size, block_size)


def largest_micro_batch(effective: int, world_size: int, limit: int) -> int:
    """The largest exact micro-batch of at most `limit` sequences; BatchError when not even 1 is allowed."""
    fitting = [n for n in micro_batches(effective, world_size) if n <= limit]
    if not fitting:
        raise BatchError(f"no micro-batch fits: at most {limit} sequences are allowed, and 1 is the least")
    return fitting[-1]


def next_smaller(plan: BatchPlan) -> BatchPlan | None:
    """The same effective batch from the next smaller micro-batch; None when `micro` is 1 already."""
    smaller = [n for n in micro_batches(plan.effective, plan.world_size) if n < plan.micro]
    return plan_batch(plan.effective, smaller[-1], plan.world_size, plan.block_size) if smaller else None


def _listed(values: list[int]) -> str:
    return ", ".join(str(value) for value in values)
