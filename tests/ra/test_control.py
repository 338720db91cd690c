from typing import Any

import numpy as np
import pytest
import torch

from gpt2.training_step import Stepper
from ra import control
from ra.control import Control, losses
from runtime.batch_plan import plan_batch
from runtime.settings import ModelConfig, OptimizerConfig
from scripts.dev.control import TOLERANCE

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


def train(name: str, swap: bool, dtype: str = "float32", steps: int = 60) -> list[float]:
    return losses(
        name, MODEL, OPTIMIZER, BATCH, batches, steps=steps, seed=0, device="cpu", dtype=dtype, swap=swap
    )


@pytest.fixture(scope="module")
def baseline() -> list[float]:
    return train("B", swap=False)


@pytest.mark.parametrize("name", ["RAALL", "RAALT", "RA:1-2"])
def test_a_fixed_pattern_from_swapped_weights_trains_like_the_baseline(
    name: str, baseline: list[float]
) -> None:
    assert Control(name, baseline, train(name, swap=True)).largest_difference < 1e-5
    assert baseline[-1] < baseline[0] - 0.1  # the loss falls, so the test compares trained models


def test_without_the_swap_the_curves_differ(baseline: list[float]) -> None:
    assert Control("RAALL", baseline, train("RAALL", swap=False)).largest_difference > 1e-5


def test_a_learned_variant_has_no_control() -> None:
    with pytest.raises(ValueError, match="not a fixed reciprocal pattern"):
        train("RALEARN", swap=True)


def move_by_units(gradient: torch.Tensor) -> torch.Tensor:
    """Move each element by -1, 0 or 1 units in the last place of bfloat16, at random."""
    units = torch.randint(-1, 2, gradient.shape, dtype=torch.int16) * (gradient != 0)
    return (gradient.view(torch.int16) + units).view(torch.bfloat16)


@pytest.mark.usefixtures("one_thread")
def test_gradients_added_in_any_order_stay_within_the_bound_for_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Atomics of a GPU's attention move an element by at most one unit. The measured difference is 6e-4 nats."""
    steps = 30
    baseline = train("B", False, "bfloat16", steps)
    moved: list[int] = []

    class AnyOrder(Stepper):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            for block in self.model.blocks:
                block.attention.qkv.register_forward_hook(self.watch)

        def watch(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: moved.append(1) or move_by_units(gradient))

    monkeypatch.setattr(control, "Stepper", AnyOrder)
    torch.manual_seed(0)
    difference = Control("B", baseline, train("B", False, "bfloat16", steps)).largest_difference
    assert len(moved) == steps * MODEL.layers * BATCH.accumulation
    assert 0 < difference < TOLERANCE["bfloat16"] / 10
