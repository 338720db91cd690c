import numpy as np
import pytest
import torch

from gpt2.config.batch import plan_batch
from gpt2.config.config import ModelConfig, OptimizerConfig
from ra.control import Control, losses

MODEL = ModelConfig("test", 4, 4, 32, 32, 0.0, vocabulary=97, padded_vocabulary=128)
OPTIMIZER = OptimizerConfig(3e-3, 0.1, 0.1, 0.1, 0.9, 0.95, 1e-8, 1.0)
BATCH = plan_batch(8, 4, 1, 32)


def batches(k: int) -> torch.Tensor:
    """Return a learnable text: random first tokens, then each token is a function of the previous one."""
    draw = np.random.default_rng(k)
    rows = draw.integers(0, 97, (8, 33))
    for t in range(1, 33):
        rows[:, t] = (3 * rows[:, t - 1] + 1) % 97
    return torch.from_numpy(rows)


def train(name: str, swap: bool) -> list[float]:
    return losses(
        name, MODEL, OPTIMIZER, BATCH, batches, steps=60, seed=0, device="cpu", dtype="float32", swap=swap
    )


@pytest.fixture(scope="module")
def baseline() -> list[float]:
    return train("B", swap=False)


@pytest.mark.parametrize("name", ["RAALL", "RAEARLY", "RALATE", "RAALT", "RA:1-2"])
def test_a_fixed_pattern_from_swapped_weights_trains_like_the_baseline(
    name: str, baseline: list[float]
) -> None:
    control = Control(name, baseline, train(name, swap=True))
    assert control.largest_difference < 1e-5
    assert baseline[-1] < baseline[0] - 0.1  # the loss falls, so the test compares trained models


def test_without_the_swap_the_curves_differ(baseline: list[float]) -> None:
    assert Control("RAALL", baseline, train("RAALL", swap=False)).largest_difference > 1e-5


def test_a_learned_variant_has_no_control() -> None:
    with pytest.raises(ValueError, match="no fixed reciprocal pattern"):
        train("RALEARN", swap=True)
