"""When a run counts as diverged, and when it does not."""

import math
import random

import pytest

from grpo.rollout import DivergedError, DivergenceMonitor


@pytest.mark.parametrize(
    ("loss", "gradient", "reward", "says"),
    [
        (math.nan, 1.0, 0.5, "the loss is nan"),
        (-math.inf, 1.0, 0.5, "the loss is -inf"),
        (0.0, math.nan, 0.5, "the gradient norm is nan"),
        (0.0, 1000.5, 0.5, r"the gradient norm is 1e\+03, above 1000"),
        (0.0, 1.0, math.nan, "the reward is nan"),
    ],
)
def test_a_number_that_is_not_finite_or_explodes(
    loss: float, gradient: float, reward: float, says: str
) -> None:
    with pytest.raises(DivergedError, match=says):
        DivergenceMonitor().observe(loss, gradient, reward)


def run(rewards: list[float]) -> int | None:
    """Return the step at which the run diverged."""
    watched = DivergenceMonitor()
    for step, reward in enumerate(rewards, 1):
        try:
            watched.observe(0.0, 0.0, reward)
        except DivergedError:
            return step
    return None


def test_a_reward_that_is_lost_is_noticed_when_ten_steps_show_it() -> None:
    assert run([0.8] * 20 + [0.0] * 30) == 28  # two steps of 0.8 among the last ten: 0.16 < 0.2


def test_noise_a_slow_rise_and_a_model_that_never_earns_a_reward_are_no_divergence() -> None:
    draw = random.Random(0)
    assert run([draw.uniform(0.4, 0.8) for _ in range(200)]) is None
    assert run([step / 200 for step in range(200)]) is None
    assert run([0.09] * 20 + [0.0] * 50) is None
    assert run([]) is None
    assert run([0.8] * 9 + [0.0] * 9) is None  # too few steps to compare
