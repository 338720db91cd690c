"""Spreads: the interval of a median."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from bench.suite import spread


@settings(max_examples=60, deadline=None)
@given(rounds=st.integers(6, 40), seed=st.integers(0, 999))
def test_the_interval_of_a_median_is_the_narrowest_that_the_sign_test_allows(rounds: int, seed: int) -> None:
    values = random.Random(seed).sample(range(1000), rounds)
    found = spread([float(value) for value in values])
    assert found
    assert found["least"] <= found["low"] <= found["median"] <= found["high"] <= found["most"]
    for bound in (found["low"], found["high"]):
        beyond = min(sum(value < bound for value in values), sum(value > bound for value in values))
        assert binomtest(beyond, rounds).pvalue <= 0.05  # a median outside of the interval is refused
        assert binomtest(beyond + 1, rounds).pvalue > 0.05  # one further inside is not
