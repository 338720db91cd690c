"""The levels of several looks, against independent integration, forward simulation and published numbers."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from referee.verdict.looks import FIRST_SHARE, adjusted_for_looks, nominal_levels

counts = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(
    lambda steps: tuple(int(n) for n in 2 + np.cumsum(steps))
)


def accepted(seeds: list[int], critical: list[float]) -> float:
    """P(every |z| is below its bound) of cumulative normal z statistics, by scipy's integration."""
    ratio = np.array([[math.sqrt(min(a, b) / max(a, b)) for b in seeds] for a in seeds])
    bound = np.array(critical)
    found = stats.multivariate_normal(cov=ratio, seed=0).cdf(bound, lower_limit=-bound)  # type: ignore[call-arg]
    return float(found)


def test_one_look_is_the_plain_t_test_at_its_share() -> None:
    assert nominal_levels((5,)) == (pytest.approx(FIRST_SHARE * 0.05),)
    assert adjusted_for_looks(0.01, (5,)) == pytest.approx(0.01 / FIRST_SHARE)
    assert adjusted_for_looks(0.01, ()) == 0.01
    assert adjusted_for_looks(1.0, (5,)) == 1.0


@pytest.mark.parametrize("seeds", [(400, 800), (400, 500, 900)])
def test_with_many_seeds_the_levels_are_those_of_multivariate_normal_statistics(
    seeds: tuple[int, ...],
) -> None:
    critical = [float(stats.norm.isf(one / 2)) for one in nominal_levels(seeds)]
    shares = [FIRST_SHARE, *((1 - FIRST_SHARE) / 2**k for k in range(1, len(seeds)))]
    assert 1 - accepted(list(seeds), critical) == pytest.approx(0.05 * sum(shares), rel=0.004)


def test_equal_looks_of_pocock_spend_5_percent() -> None:
    """Pocock 1977: 2.413 at five equally spaced looks. It checks the independent reference of the test above."""
    assert 1 - accepted([1, 2, 3, 4, 5], [2.413] * 5) == pytest.approx(0.05, abs=5e-4)


@pytest.mark.parametrize("seeds", [(3, 6), (3, 4, 5, 6), (5, 10, 15), (4, 9, 10)])
def test_each_look_spends_its_share_in_simulated_studies(seeds: tuple[int, ...]) -> None:
    """200,000 studies; the tolerance is four standard errors."""
    draw = np.random.default_rng(seeds)
    values = draw.normal(size=(200_000, seeds[-1]))
    rejected = np.zeros(len(values), bool)
    for k, (count, level) in enumerate(zip(seeds, nominal_levels(seeds), strict=True)):
        p_values = stats.ttest_1samp(values[:, :count], 0, axis=1).pvalue
        new = (p_values < level) & ~rejected
        share = 0.05 * (FIRST_SHARE if k == 0 else (1 - FIRST_SHARE) / 2**k)
        assert new.mean() == pytest.approx(share, abs=4 * math.sqrt(share / len(values)))
        rejected |= new
    assert rejected.mean() < 0.052


@settings(deadline=None, max_examples=20)
@given(counts, st.sampled_from([0.01, 0.05, 0.1]))
def test_levels_lie_between_the_share_and_the_whole(seeds: tuple[int, ...], level: float) -> None:
    found = nominal_levels(seeds, level)
    assert found[:-1] == nominal_levels(seeds[:-1], level)  # a later look changes no earlier one
    for k, one in enumerate(found[1:], 1):
        assert level * (1 - FIRST_SHARE) / 2**k * 0.99 <= one <= level
    assert nominal_levels(seeds, level / 2)[-1] < found[-1]


@settings(deadline=None, max_examples=20)
@given(counts, st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_the_adjusted_p_value_is_ordered_and_never_smaller(
    seeds: tuple[int, ...], p: float, q: float
) -> None:
    low, high = (adjusted_for_looks(one, seeds) for one in sorted((p, q)))
    assert low <= high <= 1.0
    assert low >= min(p, q) * 0.999


@pytest.mark.parametrize("seeds", [(3, 6), (3, 4, 5, 6), (5, 10)])
@pytest.mark.parametrize("level", [0.05, 0.025, 0.1])
def test_a_p_value_at_the_nominal_level_is_adjusted_to_the_level(
    seeds: tuple[int, ...], level: float
) -> None:
    p = nominal_levels(seeds, level)[-1]
    assert adjusted_for_looks(p, seeds) == pytest.approx(level, rel=1e-9)
    assert adjusted_for_looks(0.999 * p, seeds) < level
