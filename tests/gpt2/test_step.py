"""A training step in float64: the gradient does not depend on the split of the batch."""

import pytest
import torch

from gpt2.training_step import Stepper
from runtime.batch_plan import micro_batches, plan_batch
from runtime.settings import ModelConfig, OptimizerConfig

MODEL = ModelConfig("test", 2, 2, 16, 16, 0.0, vocabulary=101, padded_vocabulary=128)


def stepper(effective: int, micro: int, clip: float = 0.0) -> Stepper:
    """Return a stepper with float64 weights."""
    trainer = Stepper(
        MODEL,
        OptimizerConfig(3e-3, 0.1, 0.2, 0.1, 0.9, 0.95, 1e-8, clip, "cosine", 0.2),
        plan_batch(effective, micro, 1, MODEL.block_size),
        seed=3,
        device="cpu",
        dtype="float32",  # without autocast: that of the weights
        compile=False,
        parts=None,
    )
    trainer.model.double()
    return trainer


def batch(effective: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randint(MODEL.vocabulary, (effective, MODEL.block_size + 1), generator=draw)


def gradient(built: Stepper) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in built.parameters if p.grad is not None])


def stepped(built: Stepper, ids_ET: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """Return the gradient at the optimizer, the loss and the norm of one training step."""
    caught: list[torch.Tensor] = []
    built.optimizer.register_step_pre_hook(lambda *_: caught.append(gradient(built)))
    result = built.step(ids_ET, 0, 10)
    (found,) = caught
    assert found.dtype == torch.float64
    return found, result.loss, result.gradient_norm


def whole(effective: int) -> tuple[torch.Tensor, float]:
    """Return gradient and value of the mean loss over all sequences, by the model's loss and without a step."""
    built, ids_ET = stepper(effective, effective), batch(effective)
    loss = built.model.loss(ids_ET[:, :-1], ids_ET[:, 1:])
    loss.backward()
    return gradient(built), loss.item()


@pytest.mark.parametrize("effective", [7, 12, 16])
def test_the_gradient_of_the_effective_batch_is_the_same_for_every_split(effective: int) -> None:
    expected, loss = whole(effective)
    splits = micro_batches(effective, 1)
    assert len(splits) == sum(effective % k == 0 for k in range(1, effective + 1))
    for micro in splits:
        found, output, norm = stepped(stepper(effective, micro), batch(effective))
        assert ((found - expected).norm() / expected.norm()).item() < 1e-12, micro
        assert output == pytest.approx(loss, rel=1e-12)
        assert norm == pytest.approx(expected.norm().item(), rel=1e-12)


def test_the_gradient_is_clipped_once_and_after_the_last_micro_batch() -> None:
    expected, _ = whole(12)
    limit = expected.norm().item() / 3
    for micro in micro_batches(12, 1):
        found, _, norm = stepped(stepper(12, micro, clip=limit), batch(12))
        assert norm == pytest.approx(expected.norm().item(), rel=1e-12)
        assert (
            3 * found - expected
        ).norm().item() < 1e-5 * expected.norm().item()  # torch adds 1e-6 to the norm
