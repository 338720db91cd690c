"""When a run counts as diverged, and when it does not."""

import math

import pytest

from grpo.rollout import DivergedError, refuse_divergence

STEP = {"loss": 0.0, "grad_norm": 1e6, "reward": 0.0}  # large or lost, and an outcome


@pytest.mark.parametrize(
    ("name", "value"),
    [("loss", math.nan), ("loss", -math.inf), ("grad_norm", math.inf), ("reward", math.nan)],
)
def test_a_number_that_is_not_finite_is_a_divergence_and_no_other(name: str, value: float) -> None:
    refuse_divergence(STEP)
    refuse_divergence(STEP | {name: None})
    with pytest.raises(DivergedError, match=f"the {name} is {value}"):
        refuse_divergence(STEP | {name: value})
