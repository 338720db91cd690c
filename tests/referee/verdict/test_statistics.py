import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from referee.verdict import statistics

losses = st.floats(2, 8)


@given(difference=st.floats(-20, 20))
def test_a_difference_of_losses_is_a_ratio_of_perplexities(difference: float) -> None:
    ratio = np.exp(np.float64(5 + difference)) / np.exp(np.float64(5))
    assert statistics.perplexity_percent(difference) == pytest.approx(100 * (ratio - 1), rel=1e-9, abs=1e-9)
    assert math.isfinite(statistics.perplexity_percent(100_000.0))


@pytest.mark.parametrize("dof", [1, 2, 3, 5, 9, 30, 200])
@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95, 0.99, 0.999])
def test_t_quantiles_equal_those_of_scipy(dof: int, confidence: float) -> None:
    expected = stats.t.ppf((1 + confidence) / 2, dof)
    assert statistics.t_quantile(confidence, dof) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("quantile", [0.6, 0.75, 0.9, 0.95, 0.975, 0.995, 0.9995])
def test_t_quantiles_equal_those_of_scipy_at_every_degree_of_freedom(quantile: float) -> None:
    dofs = range(1, 201)
    observed = [statistics.t_quantile(2 * quantile - 1, dof) for dof in dofs]
    assert observed == pytest.approx(stats.t.ppf(quantile, dofs), rel=1e-8)


@given(st.lists(losses, min_size=2, max_size=9))
def test_the_interval_of_a_mean_equals_that_of_scipy(values: list[float]) -> None:
    interval = statistics.mean_interval(values)
    error = stats.sem(values)
    assert interval.low is not None
    assert interval.high is not None
    if error > 1e-9:
        low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
        assert interval.low == pytest.approx(low, rel=1e-9)
        assert interval.high == pytest.approx(high, rel=1e-9)


def test_one_value_has_no_interval() -> None:
    interval = statistics.mean_interval([3.0])
    assert (interval.mean, interval.low, interval.high, interval.contains_zero) == (3.0, None, None, None)


def test_the_noise_floor_is_the_residual_of_a_one_way_analysis_by_seed() -> None:
    draw = np.random.default_rng(0)
    table = 4 + draw.normal(size=(3, 1)) + 0.01 * draw.normal(size=(3, 4))
    floor = statistics.noise_floor(table.tolist())
    assert floor is not None
    residual = table - table.mean(axis=1, keepdims=True)
    assert floor.dof == 9
    assert floor.sigma == pytest.approx(math.sqrt((residual**2).sum() / 9))


def test_one_seed_of_four_arms_gives_three_degrees_of_freedom_and_one_arm_none() -> None:
    floor = statistics.noise_floor([[3.0, 3.1, 3.2, 3.3]])
    assert floor is not None
    assert floor.dof == 3
    assert statistics.noise_floor([[3.0], [3.1]]) is None


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_variant_without_effect_lies_in_the_noise_band_in_95_percent_of_simulated_studies(
    seeds: int,
) -> None:
    draw, inside = np.random.default_rng(11 + seeds), 0
    for _ in range(2000):
        table = draw.normal(size=(seeds, 1)) + 0.01 * draw.normal(size=(seeds, 5))
        floor = statistics.noise_floor(table[:, :4].tolist())
        assert floor is not None
        half = stats.t.ppf(0.975, floor.dof) * statistics.controls_error(floor.sigma, [4] * seeds)
        inside += abs((table[:, 4] - table[:, :4].mean(1)).mean()) <= half
    assert 0.93 <= inside / 2000 <= 0.97


@given(st.lists(st.floats(-0.1, 0.1).map(lambda value: round(value, 6)), min_size=2, max_size=9))
def test_the_paired_test_equals_that_of_scipy_and_has_its_spread(differences: list[float]) -> None:
    found, spread = statistics.paired_t(differences), np.std(differences, ddof=1)
    assert found.spread == pytest.approx(spread, abs=1e-12)
    if spread > 1e-6:
        expected = stats.ttest_1samp(differences, 0)
        assert found.p_value == pytest.approx(expected.pvalue, rel=1e-8)
        for level, interval in ((0.95, found.difference), (0.90, found.narrow)):
            bounds = expected.confidence_interval(level)
            assert (interval.low, interval.high) == pytest.approx((bounds.low, bounds.high))
        assert found.difference.contains_zero == (found.p_value >= 0.05)


def test_one_difference_has_no_test_and_equal_differences_have_a_p_value_of_zero_or_one() -> None:
    assert statistics.paired_t([0.1]).p_value is None
    assert statistics.paired_t([0.1]).spread is None
    assert statistics.paired_t([0.5, 0.5]).p_value == 0
    assert statistics.paired_t([0.0, 0.0]).p_value == 1


@pytest.mark.parametrize("dof", [1, 2, 4, 9, 30])
def test_the_interval_of_a_spread_is_the_chi_square_interval_of_scipy(dof: int) -> None:
    low, high = statistics.spread_interval(0.01, dof)
    assert low == pytest.approx(0.01 * math.sqrt(dof / stats.chi2.ppf(0.975, dof)), rel=1e-9)
    assert high == pytest.approx(0.01 * math.sqrt(dof / stats.chi2.ppf(0.025, dof)), rel=1e-9)


def test_holm_adjusts_as_published() -> None:
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_never_lowers_a_p_value_and_preserves_their_order(values: list[float]) -> None:
    adjusted = statistics.holm(values)
    assert all(after >= before for before, after in zip(values, adjusted, strict=True))
    order = sorted(range(len(values)), key=lambda i: values[i])
    assert [adjusted[i] for i in order] == sorted(adjusted)


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), max_size=300))
def test_mcnemars_exact_test_is_the_binomial_test_of_scipy_on_discordant_items(
    differences: list[float],
) -> None:
    test = statistics.sign_test(differences)
    wins, losses = differences.count(1.0), differences.count(-1.0)
    assert (test.wins, test.losses) == (wins, losses)
    expected = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert test.p_value == pytest.approx(expected, rel=1e-8)


def test_the_exact_test_holds_for_all_of_hellaswag() -> None:
    differences = [1.0] * 1530 + [-1.0] * 1412 + [0.0] * 7100
    expected = stats.binomtest(1530, 2942).pvalue
    assert statistics.sign_test(differences).p_value == pytest.approx(expected, rel=1e-8)


def test_a_ratio_of_variances_is_the_two_sided_f_test_of_scipy() -> None:
    one, other = statistics.NoiseFloor(0.02, 4), statistics.NoiseFloor(0.01, 6)
    found, mirrored = statistics.variance_ratio(one, other), statistics.variance_ratio(other, one)
    assert found is not None
    assert mirrored is not None
    assert found.ratio == pytest.approx(4)
    assert found.p_value == pytest.approx(2 * stats.f.sf(4, 4, 6), rel=1e-8)
    assert mirrored.p_value == pytest.approx(found.p_value, rel=1e-8)
    assert statistics.variance_ratio(one, statistics.NoiseFloor(0.0, 3)) is None


def test_the_variance_test_has_5_percent_false_positives_in_simulated_studies() -> None:
    draw, wrong = np.random.default_rng(7), 0
    for _ in range(2000):
        table = 4 + draw.normal(size=(3, 1)) + 0.01 * draw.normal(size=(3, 5))
        full, half = (statistics.noise_floor(part.tolist()) for part in (table[:, :2], table[:, 2:]))
        assert full is not None
        assert half is not None
        ratio = statistics.variance_ratio(half, full)
        assert ratio is not None
        wrong += ratio.p_value < 0.05
    assert 0.03 <= wrong / 2000 <= 0.07


@pytest.mark.parametrize(("a", "b"), [(1, 1), (4, 4), (2, 12), (18, 9), (60, 30)])
def test_the_undetected_ratios_end_at_the_quantiles_of_scipy(a: int, b: int) -> None:
    low, high = statistics.undetected_ratios(a, b)
    assert low == pytest.approx(stats.f.ppf(0.025, a, b), rel=1e-6)
    assert high == pytest.approx(stats.f.ppf(0.975, a, b), rel=1e-6)
