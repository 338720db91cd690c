"""The allocation tracker with known allocations: live bytes, freed bytes, names."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpt2.allocation_tracker import KINDS, AllocationTracker, Timeline


def track(work, **settings) -> Timeline:
    tracker = AllocationTracker(**settings)
    with tracker, tracker.phase("forward"):
        work()
    return tracker.timeline()


@pytest.mark.parametrize("fake", [False, True])
def test_a_tensor_counts_while_it_is_alive_and_views_and_in_place_results_do_not_count(
    fake: bool,
) -> None:
    tracker = AllocationTracker()
    mode = FakeTensorMode() if fake else torch.no_grad()
    with mode, tracker, tracker.phase("forward"):
        a = torch.zeros(100)
        view = a[10:].view(9, 10)
        view.add_(1)
        b = a + 1
        del a
        c = b.double()
        del b, view
        del c
    timeline = tracker.timeline()
    assert timeline.peak_bytes() == 400 + 400 + 800  # the view holds the storage of a
    assert timeline.curve()[-1] == 0


def test_a_saved_tensor_counts_until_backward_releases_it() -> None:
    x = torch.ones(100, requires_grad=True)
    tracker = AllocationTracker()
    with tracker:
        with tracker.phase("forward"):
            y = x.exp()  # saves its result for backward
            loss = y.sum()
            del y
        saved = tracker.timeline().curve()[-1]
        with tracker.phase("backward"):
            loss.backward()
            x.grad = None
            del loss
    assert saved == 404
    assert tracker.timeline().curve()[-1] == 0


@given(sizes=st.lists(st.tuples(st.integers(1, 3000), st.booleans()), min_size=1, max_size=30))
@settings(max_examples=40, deadline=None)
def test_the_peak_equals_a_manual_count(sizes: list[tuple[int, bool]]) -> None:
    alive: dict[int, torch.Tensor] = {}
    total = highest = 0
    tracker = AllocationTracker(granularity=512)
    with tracker, tracker.phase("forward"):
        for index, (size, drop) in enumerate(sizes):
            alive[index] = torch.empty(size, dtype=torch.uint8)
            total += -(-size // 512) * 512
            highest = max(highest, total)
            if drop:
                first = next(iter(alive))
                total -= -(-alive.pop(first).numel() // 512) * 512
        timeline = tracker.timeline()
    assert timeline.peak_bytes() == highest
    assert timeline.curve()[timeline.events] == total


def test_a_kernel_workspace_counts_until_the_kernel_ends() -> None:
    def workspace(operation, arguments) -> int:
        return 1000 if operation.__name__.startswith("exp") else 0

    x = torch.ones(100)
    tracker = AllocationTracker(workspace=workspace)
    with tracker, tracker.phase("forward"):
        y = x.exp()
        timeline = tracker.timeline()
    assert y.numel() * 4 + 1000 == timeline.peak_bytes()
    assert timeline.curve()[timeline.events] == 400


def test_a_resized_storage_counts_with_its_new_size() -> None:
    tracker = AllocationTracker()
    with tracker, tracker.phase("forward"):
        a = torch.zeros(100)
        a.resize_(300)
    assert tracker.timeline().peak_bytes() == 1200


def test_kinds_add_up_to_the_total_at_every_event() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tracker = AllocationTracker()
    with tracker:
        with tracker.phase("forward"):
            y = model(torch.ones(4, 8)).sum()
        with tracker.phase("backward"):
            y.backward()
    timeline = tracker.timeline()
    for event in range(timeline.events + 1):
        kinds = timeline.by_kind(event)
        assert set(kinds) == set(KINDS)
        assert sum(kinds.values()) == timeline.curve()[event]


def test_a_value_read_from_a_fake_tensor_is_zero_and_nonzero_returns_every_element() -> None:
    with FakeTensorMode(), AllocationTracker():
        x = torch.ones(6)
        assert x.sum().item() == 0.0
        assert (x > 0).any().item() is False
        assert x.nonzero().shape == (6, 1)


class PlusOne(torch.autograd.Function):
    """An identity plus one whose backward adds to its result."""

    @staticmethod
    def forward(ctx, x):
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 + 1


def backward_peak(loss) -> int:
    tracker = AllocationTracker()
    with tracker:
        with tracker.phase("forward"):
            built = loss()
        before = tracker.timeline().curve()[-1]
        with tracker.phase("backward"):
            built.backward()
    return tracker.timeline().peak_bytes(["backward"]) - before


def test_tracked_gradients_are_accumulated_in_place_as_by_untracked_autograd() -> None:
    """Two ways to x: the loss's gradient and two of x; another 400 for their sum would be watched, not real."""
    x = torch.ones(100, requires_grad=True)
    assert backward_peak(lambda: (x * 2 + x * 3).sum()) == 4 + 2 * 400
    assert torch.equal(x.grad, torch.full((100,), 5.0))


def test_a_sum_inside_a_backward_function_counts() -> None:
    x = torch.ones(100, requires_grad=True)
    assert (
        backward_peak(lambda: PlusOne.apply(x).mul(3).sum()) == 4 + 3 * 400
    )  # the gradient, its double, the sum
