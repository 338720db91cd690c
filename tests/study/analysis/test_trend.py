"""The trend over sizes: its contrast against references, its error rate by simulation, and its words."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from referee.verdict.statistics import Interval
from study.analysis.verdict import Verdict, judge
from study.compare.compare_sizes import CANNOT_TELL, GROWS, HOLDS, SHRINKS, SizeTrend, contrast, trends

PARAMETERS = (1_000_000, 10_000_000, 100_000_000)


def verdict(differences: Sequence[float], planned: int = 0, primary: bool = True, name: str = "X") -> Verdict:
    """The verdict of these differences to one control arm at zero."""
    table = {"B": dict.fromkeys(range(len(differences)), 4.0),
             name: {seed: 4.0 + value for seed, value in enumerate(differences)}}  # fmt: skip
    seeds = planned or len(differences)
    (found,) = judge(table, primary=name if primary else "", looks={name: (seeds,)})
    return found


def judged(effects: Sequence[Sequence[float]], parameters: Sequence[int] = PARAMETERS) -> SizeTrend:
    (found,) = trends(parameters[: len(effects)], [[verdict(values)] for values in effects])
    return found


def draws(means: Sequence[float], spread: float, seeds: int, seed: int = 0) -> list[list[float]]:
    draw = np.random.default_rng(seed)
    return [(mean + spread * draw.normal(size=seeds)).tolist() for mean in means]


def test_the_contrast_of_two_sizes_is_welchs_t_test_per_tenfold_parameters() -> None:
    small, large = draws((-0.03, -0.01), 0.01, 5)
    found = contrast((10**6, 10**8), [verdict(small), verdict(large)])
    assert found
    expected = stats.ttest_ind(large, small, equal_var=False)
    assert found.p_value == pytest.approx(float(expected.pvalue))
    assert found.dof == pytest.approx(float(expected.df))
    assert found.slope.mean == pytest.approx((np.mean(large) - np.mean(small)) / 2)
    low, high = expected.confidence_interval(1 - verdict(small).level)
    assert (found.slope.low, found.slope.high) == (pytest.approx(low / 2), pytest.approx(high / 2))


def test_the_contrast_of_three_sizes_is_the_slope_of_least_squares() -> None:
    effects = draws((-0.03, -0.02, -0.02), 0.005, 4)
    found = contrast(PARAMETERS, [verdict(values) for values in effects])
    assert found
    line = stats.linregress([6, 7, 8], [np.mean(values) for values in effects])
    assert found.slope.mean == pytest.approx(float(line.slope))
    variances = [np.var(values, ddof=1) / 4 for values in effects]
    assert found.p_value == pytest.approx(
        2 * stats.t.sf(abs(line.slope) / math.sqrt((variances[0] + variances[2]) / 4), found.dof)
    )


@pytest.mark.parametrize(
    ("seeds", "spreads"), [(3, (1, 1)), (3, (1, 4)), (5, (1, 4)), (3, (1, 1, 1)), (4, (4, 1, 2))]
)
def test_equal_effects_are_called_shrinking_or_growing_in_at_most_5_percent(
    seeds: int, spreads: tuple[int, ...]
) -> None:
    draw, studies, called, template = np.random.default_rng(5), 2000, 0, verdict([-0.02] * seeds)
    for _ in range(studies):
        effects = []
        for spread in spreads:
            values = -0.02 + 0.004 * spread * draw.normal(size=seeds)
            interval = Interval(float(values.mean()), None, None, seeds)
            test = replace(template.test, difference=interval, spread=float(values.std(ddof=1)))
            effects.append([replace(template, test=test)])
        (found,) = trends(PARAMETERS[: len(spreads)], effects)
        called += found.word in (SHRINKS, GROWS)
    assert called / studies < 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)


@pytest.mark.parametrize(
    ("means", "word"),
    [
        ((-0.03, -0.03, -0.03), HOLDS),
        ((0.03, 0.03, 0.03), HOLDS),
        ((-0.06, -0.04, -0.01), SHRINKS),
        ((0.06, 0.04, 0.01), SHRINKS),
        ((-0.01, -0.03, -0.06), GROWS),
        ((0.0, 0.0, 0.0), CANNOT_TELL),
        ((-0.05, -0.03, 0.02), SHRINKS),
    ],
)
def test_clear_trends_have_their_words(means: tuple[float, ...], word: str) -> None:
    found = judged(draws(means, 0.002, 5))
    assert found.word == word
    mirrored = judged([[-value for value in values] for values in draws(means, 0.002, 5)])
    assert mirrored.word == word


def test_a_size_that_is_unfinished_or_missing_or_has_two_seeds_gives_no_trend() -> None:
    small, large = draws((-0.03, -0.03), 0.001, 3)
    for effects in (
        [[verdict(small)], [verdict(large, planned=5)]],
        [[verdict(small)], []],
        [[verdict(small)], [verdict(large[:2])]],
    ):
        (found,) = trends(PARAMETERS[:2], effects)
        assert (found.word, found.contrast, found.adjusted_p) == (CANNOT_TELL, None, None)
    assert trends((10**6, 10**6), [[verdict(small)], [verdict(large)]])[0].word == CANNOT_TELL


def test_exploratory_arms_share_holms_correction_and_the_primary_one_does_not() -> None:
    small, large = draws((-0.03, -0.02), 0.006, 5, seed=3)
    arms = ("P", "Q", "R")
    by_size = [
        [verdict(values, primary=name == "P", name=name) for name in arms] for values in (small, large)
    ]
    found = {one.arm: one for one in trends(PARAMETERS[:2], by_size)}
    (alone,) = trends(PARAMETERS[:2], [[verdict(small, name="P")], [verdict(large, name="P")]])
    assert found["P"].adjusted_p == alone.adjusted_p
    assert alone.adjusted_p is not None
    assert found["Q"].adjusted_p == pytest.approx(min(1.0, 2 * alone.adjusted_p))


def test_differences_without_spread_are_judged_by_their_means() -> None:
    assert judged([[-0.02] * 3, [-0.02] * 3]).word == HOLDS
    assert judged([[-0.02] * 3, [-0.01] * 3]).word == SHRINKS
