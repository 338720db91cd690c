"""Test the answers of a transfer study: against scipy, in clear cases, and their error rate without any effect."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from study.evaluation.transfer_matrix import (
    CANNOT_TELL,
    COSTS,
    GAP,
    GROWS,
    NO_GAP,
    SHRINKS,
    SMALL_GAP,
    TOO_FEW,
    Losses,
    judge_transfer,
)

MARGIN = 0.01
SEEDS = 5
NOISY = "B+AQN=mild"
Table = dict[str, dict[str, dict[int, float]]]


def table(
    plain: float, noisy: float, seeds: int = SEEDS, noise: float = 0.002, seed: int = 0, cost: float = 0.0
) -> Table:
    """Losses at home and away of two control arms with the gap `plain` and of an arm with noise."""
    draw = np.random.default_rng(seed)
    found: Table = {"fp32": {}, "int4": {}}
    for arm in ("B", "RAALL", NOISY):
        extra, gap = (cost, noisy) if arm == NOISY else (0.0, plain)
        home = {one: 2.0 + extra + float(draw.normal(0, noise)) for one in range(seeds)}
        found["fp32"][arm] = home
        found["int4"][arm] = {one: loss + gap + float(draw.normal(0, noise)) for one, loss in home.items()}
    return found


def words(losses: Losses) -> tuple[list[str], list[str], list[str]]:
    found = judge_transfer(losses, "fp32", MARGIN)
    gaps, shrinks, costs = ([one.word for one in part] for part in (found.gaps, found.shrinks, found.costs))
    return gaps, shrinks, costs


def test_clear_cases() -> None:
    assert words(table(0.0, 0.0))[:2] == ([NO_GAP], [])
    assert words(table(0.1, 0.05, cost=0.05)) == ([GAP], [SHRINKS], [COSTS])
    assert words(table(0.1, 0.2))[:2] == ([GAP], [GROWS])
    assert words(table(0.004, 0.0, noise=0.0005))[:2] == ([SMALL_GAP], [])
    assert words(table(0.1, 0.05, seeds=2)) == ([TOO_FEW], [TOO_FEW], [TOO_FEW])
    assert words(table(0.0, 0.0, noise=0.05))[0] == [CANNOT_TELL]


def test_an_arm_with_a_diverged_run_is_not_judged_by_its_other_runs() -> None:
    losses = table(0.1, 0.05, cost=0.05)
    found = judge_transfer(losses, "fp32", MARGIN, {NOISY: [3]})
    assert ([one.word for one in found.gaps], found.shrinks, found.costs) == ([GAP], [], [])


def test_equal_losses_are_no_gap() -> None:
    equal = {arm: dict.fromkeys(range(3), 2.0) for arm in ("B", NOISY)}
    assert words({"fp32": equal, "foreign:0": equal})[0] == [NO_GAP]


def test_the_tests_are_those_of_scipy() -> None:
    losses = table(0.1, 0.06, noise=0.02)
    found = judge_transfer(losses, "fp32", MARGIN)
    home, away = losses["fp32"], losses["int4"]
    controls = [np.mean([away[arm][s] - home[arm][s] for arm in ("B", "RAALL")]) for s in range(SEEDS)]
    gaps = [away[NOISY][s] - home[NOISY][s] for s in range(SEEDS)]
    base = [np.mean([home[arm][s] for arm in ("B", "RAALL")]) for s in range(SEEDS)]
    at_home = [home[NOISY][s] for s in range(SEEDS)]
    assert found.gaps[0].p_value == pytest.approx(stats.ttest_1samp(controls, 0.0).pvalue)
    assert found.shrinks[0].p_value == pytest.approx(stats.ttest_rel(gaps, controls).pvalue)
    assert found.costs[0].p_value == pytest.approx(stats.ttest_rel(at_home, base).pvalue)
    assert found.costs[0].test.difference.mean == pytest.approx(np.mean(at_home) - np.mean(base))


def test_noise_without_an_effect_is_called_in_five_percent_of_studies() -> None:
    """The margin is as small as the noise of a run, so equivalence is rare and no answer hides a call."""
    found = [words(table(0.1, 0.1, noise=0.01, seed=seed))[1] for seed in range(1000)]
    called = sum(word in (SHRINKS, GROWS) for (word,) in found)
    assert 50 - 3 * 7 < called < 50 + 3 * 7


def test_an_arm_is_compared_with_its_own_arm_without_noise() -> None:
    home = {
        "B": {0: 2.0, 1: 2.1, 2: 2.2},
        "RALEARN": {0: 1.0, 1: 1.1, 2: 1.2},
        "RALEARN+AQN=mild": {0: 1.01, 1: 1.12, 2: 1.21},
        "GATED+AQN=mild": {0: 1.0, 1: 1.0, 2: 1.0},
    }
    found = judge_transfer({"fp32": home}, "fp32", MARGIN)
    assert [one.arm for one in found.costs] == ["RALEARN+AQN=mild"]  # GATED without noise was not trained
    assert found.costs[0].test.difference.mean == pytest.approx(0.04 / 3)


def test_without_control_arms_an_arm_is_compared_with_its_own_arm_alone() -> None:
    """The gap is that of all arms without noise; another attention is not a base of the comparison with noise."""
    losses = {
        platform: {
            arm: {seed: loss + 0.001 * seed + gap for seed in range(3)}
            for arm, loss, gap in (
                ("RALEARN", 1.0, away),
                ("GATED", 2.0, 3 * away),
                ("RALEARN+AQN=mild", 1.03, away / 2),
            )
        }
        for platform, away in (("fp32", 0.0), ("int4", 0.1))
    }
    found = judge_transfer(losses, "fp32", MARGIN)
    assert found.gaps[0].test.difference.mean == pytest.approx(0.2)
    assert [(one.arm, one.word) for one in found.costs] == [("RALEARN+AQN=mild", COSTS)]
    assert found.costs[0].test.difference.mean == pytest.approx(0.03)
    assert found.shrinks[0].test.difference.mean == pytest.approx(-0.05)
