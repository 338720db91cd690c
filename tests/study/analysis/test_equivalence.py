"""Control arms: their noise, the check of equal means and the check of equal variances."""

import numpy as np
import pytest
from scipy import stats

from referee.verdict.statistics import NoiseFloor
from study.analysis import verdict
from study.analysis.verdict import VarianceCheck

Table = dict[str, dict[int, float]]


def checked(final: Table) -> VarianceCheck:
    check = verdict.variance_check(final)
    assert check is not None
    return check


def arms(seeds: int, draw: np.random.Generator) -> Table:
    values = 4 + 0.1 * draw.normal(size=(seeds, 1)) + 0.005 * draw.normal(size=(seeds, 4))
    return {name: dict(enumerate(values[:, k].tolist())) for k, name in enumerate(verdict.SQUARE)}


def test_a_control_arm_that_differs_from_the_others_is_named() -> None:
    table = arms(5, np.random.default_rng(0))
    assert verdict.odd_controls(table) == []
    table["RAALL"] = {seed: loss + 0.2 for seed, loss in table["RAALL"].items()}
    table["RALEARN"] = {seed: loss + 5 for seed, loss in table["B"].items()}
    assert "RAALL" in verdict.odd_controls(table)
    assert "RALEARN" not in verdict.odd_controls(table)


def test_equal_control_arms_are_named_in_at_most_one_study_of_twenty() -> None:
    draw = np.random.default_rng(1)
    named = sum(bool(verdict.odd_controls(arms(4, draw))) for _ in range(2000))
    assert 0.02 <= named / 2000 <= 0.065


def test_two_seeds_name_no_control_arm() -> None:
    table = arms(2, np.random.default_rng(2))
    table["RAALL"] = {seed: loss + 9 for seed, loss in table["RAALL"].items()}
    assert verdict.odd_controls(table) == []


def test_control_losses_are_those_of_one_function_class_and_duplicates_count_once() -> None:
    table = {"B": {0: 1.0, 1: 2.0}, "RALATE": {0: 1.5}, "RAALT": {0: 1.5}, "RALEARN": {0: 9.0, 2: 9.0}}
    assert verdict.control_losses(table) == [[1.0, 1.5], [2.0], []]
    assert verdict.control_losses(table, [1]) == [[2.0]]


def test_the_noise_band_is_a_t_interval_of_the_difference_to_k_arms() -> None:
    expected = stats.t.ppf(0.975, 9) * 0.01 * np.sqrt((1 + 1 / 4) / 3)
    assert verdict.noise_band(NoiseFloor(0.01, 9), [4, 4, 4]) == pytest.approx(expected)


def square(halves: float, together: float, seeds: int) -> dict[str, dict[int, float]]:
    """Return losses of the four arms: a shift for each seed, the effect of each half, and their interaction."""
    draw = np.random.default_rng(3)
    signs = {"B": (-1, -1), "RAEARLY": (1, -1), "RALATE": (-1, 1), "RAALL": (1, 1)}
    drawn = draw.normal(size=(seeds, 4)) * (1, halves / 2, halves / 2, together / 2)
    return {
        name: {s: 4 + float(drawn[s] @ (1, a, b, a * b)) for s in range(seeds)}
        for name, (a, b) in signs.items()
    }


def test_additive_arms_are_distinguished_from_arms_with_equal_variances() -> None:
    """Then a half swap has half the variance of a full one; the pairs of opposites do not show it."""
    check = checked(square(0.02, 0.001, 6))
    assert check.enough
    assert [test.dof for test in check.tests] == [(12, 6), (6, 6)]
    assert check.adjusted_p[0] < 1e-4


def test_arms_that_agree_in_pairs_are_found_by_early_against_late() -> None:
    """B with RALATE, and RAEARLY with RAALL: the late half does nothing."""
    draw = np.random.default_rng(4)
    pairs = draw.normal(size=(6, 2))[:, [0, 1, 0, 1]] + 0.05 * draw.normal(size=(6, 4))
    check = checked({name: dict(enumerate(pairs[:, k].tolist())) for k, name in enumerate(verdict.SQUARE)})
    assert check.early is not None
    assert check.late is not None
    assert check.early.sigma > 5 * check.late.sigma
    assert check.differs
    assert check.adjusted_p[1] < 1e-3


def test_the_contrasts_of_the_arms_equal_a_regression() -> None:
    draw = np.random.default_rng(5)
    final = {name: {s: float(4 + draw.normal()) for s in range(5)} for name in verdict.SQUARE}
    design = np.array([[1, -1, -1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, 1, 1, 1]]) / 2  # orthonormal
    found = np.array([np.linalg.solve(design, [final[n][s] for n in verdict.SQUARE]) for s in range(5)])
    check = checked(final)
    assert check.halves is not None
    assert check.together is not None
    assert check.halves.sigma**2 == pytest.approx((found[:, 1:3] ** 2).mean())
    assert check.together.sigma**2 == pytest.approx((found[:, 3] ** 2).mean())
    assert (check.halves.dof, check.together.dof) == (10, 5)
    final["RAALL"].pop(2)
    fewer = checked(final)
    assert fewer.together is not None
    assert fewer.together.dof == 4


def test_independent_arms_fail_the_variance_check_in_one_study_of_twenty() -> None:
    draw, found = np.random.default_rng(8), 0
    for _ in range(2000):
        losses = draw.normal(size=(4, 4)).tolist()
        final = {name: dict(enumerate(values)) for name, values in zip(verdict.SQUARE, losses, strict=True)}
        found += checked(final).differs
    assert 0.03 <= found / 2000 <= 0.07


def test_variances_are_compared_from_three_seeds_on() -> None:
    """Three seeds give 6 and 3 degrees of freedom, two give 4 and 2."""
    assert not checked(square(0.02, 0.001, 2)).enough
    assert checked(square(0.02, 0.001, 3)).enough
