import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from referee.verdict import power, statistics


def rejected(effect: float, dof: int) -> float:
    """The power by integration over the estimate of the spread: Z + effect against the critical t times it."""
    critical = stats.t.ppf(0.975, dof)

    def given_spread(spread: float) -> float:
        sides = stats.norm.sf(critical * spread - effect) + stats.norm.cdf(-critical * spread - effect)
        return float(sides * stats.chi.pdf(spread * math.sqrt(dof), dof) * math.sqrt(dof))

    return float(integrate.quad(given_spread, 0, 10, limit=400)[0])


@pytest.mark.parametrize("dof", [1, 2, 3, 6, 9, 12, 15, 30, 100])
def test_the_detectable_effect_has_a_power_of_80_percent(dof: int) -> None:
    effect = power.detectable(dof)
    assert rejected(effect, dof) == pytest.approx(0.8, abs=1e-6)
    if dof > 1:  # scipy has no number there
        critical = stats.t.ppf(0.975, dof)
        by_scipy = stats.nct.sf(critical, dof, effect) + stats.nct.cdf(-critical, dof, effect)
        assert by_scipy == pytest.approx(0.8, abs=1e-6)


def test_without_an_effect_the_power_is_the_significance_level_and_it_grows_with_the_effect() -> None:
    assert power.power(0.0, 7) == pytest.approx(0.05, abs=1e-9)
    observed = [power.power(effect / 2, 7) for effect in range(80)]
    assert observed == sorted(observed)
    assert power.power(1e9, 1) == 1.0


@pytest.mark.parametrize("seeds", [3, 5, 9])
def test_the_minimum_detectable_effect_is_detected_in_80_percent_of_simulated_studies(seeds: int) -> None:
    effect, draw, found = power.mde(0.01, seeds), np.random.default_rng(seeds), 0
    for _ in range(2000):
        p_value = statistics.paired_t((effect + 0.01 * draw.normal(size=seeds)).tolist()).p_value
        found += p_value is not None and p_value < 0.05
    assert 0.77 <= found / 2000 <= 0.83


@given(st.floats(1e-4, 0.1), st.floats(1e-3, 0.5))
@settings(deadline=None, max_examples=30)
def test_the_seeds_needed_are_the_fewest_that_detect_the_effect(spread: float, effect: float) -> None:
    seeds = power.seeds_for(spread, effect)
    if seeds is None:
        assert power.mde(spread, power.MOST_SEEDS) > effect
        return
    assert power.mde(spread, seeds) <= effect
    assert seeds == 2 or power.mde(spread, seeds - 1) > effect
    assert power.seeds_for(spread, effect, 3) == max(3, seeds)


@pytest.mark.parametrize(
    ("effect", "dof", "level"), [(0.5, 2, 0.047), (1.5, 4, 0.047), (1.0, 9, 0.004), (4.0, 2, 0.05)]
)
def test_the_exaggeration_is_that_of_simulated_studies(effect: float, dof: int, level: float) -> None:
    """Two million studies; the type M error of Gelman and Carlin."""
    draw = np.random.default_rng(dof)
    estimates = effect + draw.normal(size=2_000_000)
    spreads = np.sqrt(draw.chisquare(dof, size=estimates.size) / dof)
    called = np.abs(estimates) > stats.t.isf(level / 2, dof) * spreads
    expected = np.abs(estimates[called]).mean() / effect
    assert power.exaggeration(effect, dof, level) == pytest.approx(expected, rel=0.01)


def test_the_exaggeration_falls_with_the_effect_to_1() -> None:
    found = [power.exaggeration(effect / 4, 4) for effect in range(1, 80)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("effect", "level"), [(36.9, 0.001), (40.0, 0.001), (200.0, 1e-4)])
def test_the_power_at_a_strict_level_and_a_large_effect_is_that_of_simulated_studies(
    effect: float, level: float
) -> None:
    draw = np.random.default_rng(1)
    estimates, spreads = effect + draw.normal(size=400_000), np.sqrt(draw.chisquare(2, size=400_000) / 2)
    called = np.abs(estimates) > stats.t.isf(level / 2, 2) * spreads
    assert power.power(effect, 2, level) == pytest.approx(called.mean(), abs=4e-3)
