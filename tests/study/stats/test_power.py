import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from study.stats import power, statistics


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


def test_without_an_effect_the_power_is_the_level_and_it_grows_with_the_effect() -> None:
    assert power.power(0.0, 7) == pytest.approx(0.05, abs=1e-9)
    seen = [power.power(effect / 2, 7) for effect in range(80)]
    assert seen == sorted(seen)
    assert power.power(1e9, 1) == 1.0


@pytest.mark.parametrize(("seeds", "arms"), [(1, 4), (3, 4), (2, 2), (5, 3)])
def test_a_detectable_effect_is_detected_in_80_percent_of_simulated_studies(seeds: int, arms: int) -> None:
    design = power.against_arms(0.01, [arms] * seeds, seeds * (arms - 1))
    assert design is not None
    effect = design.detectable(seeds)
    assert effect is not None
    draw, found = np.random.default_rng(seeds * 10 + arms), 0
    for _ in range(2000):
        base = 4 + 0.1 * draw.normal(size=seeds)
        equivalent = (base[:, None] + 0.01 * draw.normal(size=(seeds, arms))).tolist()
        variant = (base + effect + 0.01 * draw.normal(size=seeds)).tolist()
        seen = statistics.against_floor(list(zip(variant, equivalent, strict=True)))
        assert seen is not None
        found += seen.p_value < 0.05
    assert 0.77 <= found / 2000 <= 0.83


@given(st.floats(1e-4, 0.1), st.integers(2, 6), st.floats(1e-3, 0.5))
@settings(deadline=None, max_examples=30)
def test_the_seeds_needed_are_the_fewest_that_detect_the_effect(
    sigma: float, arms: int, effect: float
) -> None:
    design = power.against_arms(sigma, [arms], arms - 1)
    assert design is not None
    seeds = power.seeds_for([design], effect)
    if seeds is None:
        most = design.detectable(power.MOST_SEEDS)
        assert most is not None
        assert most > effect
        return
    enough = design.detectable(seeds)
    assert enough is not None
    assert enough <= effect
    if seeds > 1:
        fewer = design.detectable(seeds - 1)
        assert fewer is None or fewer > effect


def test_a_single_arm_and_a_single_pair_leave_no_test() -> None:
    assert power.against_arms(0.01, [1, 1], 1) is None
    paired = power.Design(0.01, 1, 1)
    assert paired.detectable(1) is None
    assert paired.detectable(2) is not None


def test_several_tests_detect_what_each_of_them_does() -> None:
    arms, own = power.Design(0.01, 3, 0), power.Design(0.02, 1, 1)
    assert power.all_detect([arms, own], 1) is None
    assert power.all_detect([arms, own], 4) == own.detectable(4)
    needed = power.seeds_for([arms, own], 0.02)
    assert needed == power.seeds_for([own], 0.02)
