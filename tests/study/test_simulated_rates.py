"""The simulation judges as the report does; a control arm wins by tuning in no more studies than by chance."""

import numpy as np
import pytest

from referee.verdict.design import MARGIN, Design
from scripts.dev.simulate_verdicts import Values
from study.analysis.verdict import BETTER, WORSE, judge_tuned
from tests.study import simulated_rates as tested

RATES = ("1e-3", "2e-3", "4e-3")


def by_rule(arms: tested.Arms, number: int) -> int:
    """Judge one simulated study with the functions of the report."""

    def best(tuning: Values) -> str:
        return RATES[int(tuning[number].mean(axis=1).argmin())]

    shared, own = best(arms.controls_tuning), best(arms.variant_tuning)
    losses = {
        f"{name}+LR={rate}": dict(enumerate(values[number, place].tolist()))
        for name, values in (("B", arms.controls), ("RALEARN", arms.variant))
        for place, rate in enumerate(RATES)
    }
    arm, seeds = f"RALEARN+LR={own}", arms.variant.shape[2]
    design = Design((f"B+LR={shared}",), (arm,), "", tuple(range(seeds)), (seeds,), MARGIN, choice="any")
    (verdict,) = judge_tuned(losses, design, {arm: (seeds,)}, {arm: seeds}).best
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
