"""What designs detect: monotone in seeds and arms, the cheapest one by brute force, and the power by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from study.analysis.designs import (
    MOST_CONTROLS,
    Noise,
    cheapest_design,
    detectable_difference,
)
from study.analysis.verdict import VERDICT_SEEDS, judge

SIGMAS = st.floats(1e-4, 0.05)


@given(SIGMAS, SIGMAS, st.integers(1, MOST_CONTROLS), st.integers(2, 60))
def test_more_seeds_or_control_arms_never_raise_the_detectable_difference(
    arm: float, control: float, controls: int, seeds: int
) -> None:
    noise = Noise(arm, control)
    found = detectable_difference(noise, controls, seeds)
    assert detectable_difference(noise, controls, seeds + 1) <= found
    assert detectable_difference(noise, controls + 1, seeds) <= found


@settings(max_examples=40, deadline=None)
@given(st.floats(0.002, 0.02), st.floats(0.002, 0.02), st.floats(0.004, 0.03), st.integers(1, 4))
def test_the_cheapest_design_sees_the_effect_and_no_cheaper_one_does(
    arm: float, control: float, effect: float, judged: int
) -> None:
    noise = Noise(arm, control)
    found = cheapest_design(noise, effect, lambda controls, seeds: (controls + judged) * seeds)
    assert found
    assert found.seeds >= VERDICT_SEEDS
    assert found.sees == detectable_difference(noise, found.controls, found.seeds) <= effect
    for controls in range(1, MOST_CONTROLS + 1):
        for seeds in range(VERDICT_SEEDS, found.runs // (controls + judged) + 1):
            runs = (controls + judged) * seeds
            if runs < found.runs or (runs == found.runs and controls < found.controls):
                assert detectable_difference(noise, controls, seeds) > effect


def test_an_effect_that_no_thousand_seeds_detect_has_no_design() -> None:
    assert cheapest_design(Noise.of_both(1.0), 1e-3, lambda controls, seeds: controls * seeds) is None


@pytest.mark.parametrize(("arm", "controls", "seeds"), [(0.005, 1, 7), (0.01, 3, 5)])
def test_a_difference_of_that_size_is_called_in_80_percent_of_simulated_studies(
    arm: float, controls: int, seeds: int
) -> None:
    draw, called, studies = np.random.default_rng(7), 0, 1500
    effect = detectable_difference(Noise(arm, 0.005), controls, seeds)
    names = ["B", "RAEARLY", "RALATE", "RAALL"][:controls]
    for _ in range(studies):
        base = 4 + 0.02 * draw.normal(size=seeds)
        table = {name: dict(enumerate((base + 0.005 * draw.normal(size=seeds)).tolist())) for name in names}
        table["RALEARN"] = dict(enumerate((base - effect + arm * draw.normal(size=seeds)).tolist()))
        (verdict,) = judge(table, primary="RALEARN", looks={"RALEARN": (seeds,)})
        called += verdict.word == "better"
    assert abs(called / studies - 0.8) < 4 * math.sqrt(0.8 * 0.2 / studies)


def test_the_noise_of_differences_is_separated_into_the_arms_part_and_the_controls() -> None:
    noise = Noise.from_differences(math.sqrt(0.01**2 + 0.004**2 / 4), 4, 0.004, 4)
    assert (noise.arm, noise.control, noise.dof) == (pytest.approx(0.01), 0.004, 4)
    assert noise.spread(4) == pytest.approx(math.sqrt(0.01**2 + 0.004**2 / 4))
    assert Noise.from_differences(0.001, 1, 0.004, 4).arm == 0.0
    low, high = noise.bounds()
    assert low.spread(1) < noise.spread(1) < high.spread(1)
    given = Noise.of_both(0.005)
    assert given.bounds() == (given, given)
