"""The allocation tracker with known allocations: live bytes, freed bytes, names."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from gpt2.allocation_tracker import AllocationTracker


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


def test_a_resized_storage_counts_with_its_new_size() -> None:
    tracker = AllocationTracker()
    with tracker, tracker.phase("forward"):
        a = torch.zeros(100)
        a.resize_(300)
    assert tracker.timeline().peak_bytes() == 1200


def test_a_value_read_from_a_fake_tensor_is_zero_and_nonzero_returns_every_element() -> None:
    with FakeTensorMode(), AllocationTracker():
        x = torch.ones(6)
        assert x.sum().item() == 0.0
        assert (x > 0).any().item() is False
        assert x.nonzero().shape == (6, 1)
