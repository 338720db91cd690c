import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.batch_plan import (
    BatchError,
    BatchPlan,
    largest_micro_batch,
    micro_batches,
    next_smaller,
    plan_batch,
)

sizes = st.integers(1, 2048)
worlds = st.integers(1, 16)


@given(effective=sizes, micro=sizes, world_size=worlds)
def test_effective_batch_is_exact_or_refused(effective: int, micro: int, world_size: int) -> None:
    works = effective % (micro * world_size) == 0
    if works:
        plan = plan_batch(effective, micro, world_size, block_size=8)
        assert plan.micro * plan.accumulation * plan.world_size == effective
        assert plan.tokens == effective * 8
    else:
        with pytest.raises(BatchError):
            plan_batch(effective, micro, world_size, block_size=8)


@given(effective=sizes, world_size=worlds)
def test_micro_batches_are_exactly_the_divisors(effective: int, world_size: int) -> None:
    brute = [n for n in range(1, effective + 1) if effective % (n * world_size) == 0]
    if effective % world_size:
        with pytest.raises(BatchError, match="share effective batch"):
            micro_batches(effective, world_size)
    else:
        assert micro_batches(effective, world_size) == brute


@given(effective=sizes, limit=sizes)
def test_the_largest_micro_batch_is_exact_and_within_the_limit(effective: int, limit: int) -> None:
    micro = largest_micro_batch(effective, 1, limit)
    assert effective % micro == 0
    assert micro <= limit
    assert not any(effective % n == 0 for n in range(micro + 1, min(limit, effective) + 1))


@given(effective=sizes)
def test_smaller_micro_batches_leave_the_effective_batch_unchanged_and_end_at_one(effective: int) -> None:
    plan: BatchPlan | None = plan_batch(effective, effective, 1, block_size=8)
    sizes = []
    while plan is not None:
        assert plan.micro * plan.accumulation == effective
        sizes.append(plan.micro)
        plan = next_smaller(plan)
    assert sizes == sorted(micro_batches(effective, 1), reverse=True)


def test_factors_whose_product_is_not_the_effective_batch_are_refused() -> None:
    with pytest.raises(BatchError, match=r"effective batch 512 is not micro 32 x accumulation 15 x 1"):
        BatchPlan(effective=512, micro=32, accumulation=15, world_size=1, block_size=1024)
