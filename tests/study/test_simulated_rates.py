"""The simulation judges as the report does; a control arm wins by tuning in no more studies than by chance."""

import numpy as np
import pytest

from scripts.dev.simulate_verdicts import Values
from study.analysis.verdict import BETTER, WORSE, judge
from study.plan_file import LearningRates
from study.study_settings import choose, control_rate
from study.tuned_rates import confirm, moved
from tests.study import simulated_rates as tested

RATES = ("1e-3", "2e-3", "4e-3")


def by_rule(arms: tested.Arms, number: int) -> int:
    """Judge one simulated study with the functions of the report."""
    tuning = {
        name: {rate: list(values[number, place]) for place, rate in enumerate(RATES)}
        for name, values in (("B", arms.controls_tuning), ("RALEARN", arms.variant_tuning))
    }
    rates = choose(tuning, LearningRates(RATES, arms.variant_tuning.shape[2]))

    def losses(values: Values, rate: str) -> dict[int, float]:
        return dict(enumerate(values[number, RATES.index(rate)].tolist()))

    own, shared = rates.chosen["RALEARN"], control_rate(rates)
    controls = {"B": losses(arms.controls, shared)}
    variant = losses(arms.variant, own)
    at_rate = {"B": losses(arms.controls, own)}
    tables = (
        controls | {"RALEARN": variant},
        controls | {"RALEARN": losses(arms.variant, shared)},
        controls | {"RALEARN": moved(variant, controls, at_rate)},
    )
    (verdict,) = confirm(*(judge(table, looks={"RALEARN": (len(variant),)}) for table in tables))
    return {BETTER: 1, WORSE: -1}.get(verdict.word, 0)


@pytest.mark.parametrize("depth", [0.5, 1.5])
@pytest.mark.parametrize("word", [1, -1])
def test_many_studies_are_judged_as_one_is(depth: float, word: int) -> None:
    draw = np.random.default_rng(round(10 * depth))
    effect = np.array([-3.0, 0.0, 3.0]) if word == 1 else np.array([3.0, 1.0, 3.0])
    arms = tested.draw_arms(draw, 300, (1, 2, 4), tested.valley(3, depth), effect)
    expected = [by_rule(arms, number) for number in range(300)]
    assert tested.apply_rule(arms).tolist() == expected
    assert {word, 0} <= set(expected)


@pytest.mark.parametrize("design", [(1, 2, 5), (1, 2, 9), (4, 2, 5)])
@pytest.mark.parametrize("depth", [0.0, 1.0, 2.0])
def test_a_control_arm_is_called_in_at_most_5_percent_of_studies_whatever_the_curve(
    design: tuple[int, int, int], depth: float
) -> None:
    """20,000 studies; 0.45 points are four standard errors of 2.5 %."""
    draw = np.random.default_rng([*design, round(depth)])
    found = tested.apply_rule(tested.draw_arms(draw, 20_000, design, tested.valley(3, depth)))
    assert np.mean(found == 1) < 0.0295
    assert np.mean(found == -1) < 0.0295
