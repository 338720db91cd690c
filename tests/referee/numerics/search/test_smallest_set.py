"""The smallest set by few questions."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from referee.numerics.search.bisect_replays import smallest_set


class Asked:
    """A predicate that remembers its answers, as a search does."""

    def __init__(self, holds: Any) -> None:
        self.holds, self.answers = holds, {}

    def __call__(self, value: Any) -> bool:
        key = json.dumps(value)
        if key not in self.answers:
            self.answers[key] = bool(self.holds(value))
        found: bool = self.answers[key]
        return found


@pytest.mark.parametrize("count", [1, 2, 7, 48, 300])
def test_one_culprit_takes_log2_of_the_items(count: int) -> None:
    for culprit in range(0, count, max(1, count // 9)):
        asked = Asked(lambda chosen, culprit=culprit: culprit in chosen)
        assert smallest_set(range(count), asked) == (culprit,)
        assert len(asked.answers) <= math.ceil(math.log2(count)) + 3


@given(st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_the_set_holds_and_no_item_of_it_can_be_left_out(count: int, data: st.DataObject) -> None:
    culprits = data.draw(st.lists(st.sets(st.integers(0, count - 1), min_size=1), min_size=1, max_size=3))
    asked = Asked(lambda chosen: any(one <= set(chosen) for one in culprits))  # any of these sets suffices
    found = smallest_set(range(count), asked)
    assert found is not None
    assert set(found) in culprits
    assert found == tuple(sorted(found))


@given(st.integers(1, 8), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_predicate_without_order_gives_a_set_that_holds(count: int, random: Any) -> None:
    table = {mask: random.random() < 0.5 for mask in range(2**count)} | {2**count - 1: True, 0: False}
    asked = Asked(lambda chosen: table[sum(1 << item for item in chosen)])
    found = smallest_set(range(count), asked)
    assert found
    assert asked(found)
    assert not any(asked(tuple(item for item in found if item != one)) for one in found)
