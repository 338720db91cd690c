"""A step that is not finite is traced to the first module, micro-batch and data where it went wrong."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from gpt2.nan_debug import MAX_RETRIES, FaultLog, NotFinite, first_not_finite
from gpt2.training_step import NotFiniteError, Stepper
from gpt2.transformer import CausalSelfAttention
from runtime.batch_plan import plan_batch
from runtime.settings import ModelConfig, OptimizerConfig


def stepper(dropout: float = 0.0) -> Stepper:
    return Stepper(
        ModelConfig("test", 2, 2, 16, 16, dropout),
        OptimizerConfig(3e-3, 0.1, 0.2, 0.1, 0.9, 0.95, 1e-8, 1.0),
        plan_batch(6, 2, 1, 16),
        seed=0,
        device="cpu",
        dtype="float32",
        compile=False,
        parts=None,
    )


def ids() -> torch.Tensor:
    return torch.randint(0, 1000, (6, 17), generator=torch.Generator().manual_seed(1))


class BadWhen(torch.autograd.Function):
    """The identity, with NaN in forward or backward where the batch has a certain token."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bad_forward: bool, bad_backward: bool) -> torch.Tensor:
        ctx.bad = bad_backward
        return x * math.nan if bad_forward else x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * math.nan if ctx.bad else gradients[0], None, None


def spoil(built: Stepper, name: str, token: int, forward: bool) -> None:
    """From now on `name` goes wrong in the micro-batches that contain `token`."""
    observed: list[bool] = [False]
    model: Any = built.model
    model.token.register_forward_pre_hook(
        lambda module, inputs: observed.__setitem__(0, bool((inputs[0] == token).any()))
    )
    module: nn.Module = model.get_submodule(name)
    module.register_forward_hook(
        lambda module, inputs, output: BadWhen.apply(
            output, forward and observed[0], not forward and observed[0]
        )
    )


@pytest.mark.parametrize(("name", "micro"), [("blocks.0.mlp.fc", 0), ("blocks.1.attention", 1), ("norm", 2)])
def test_the_first_output_that_is_not_finite_is_named_with_its_micro_batch(name: str, micro: int) -> None:
    built, batch = stepper(), ids()
    batch[2 * micro, 3] = 40_000
    spoil(built, name, 40_000, forward=True)
    with pytest.raises(NotFiniteError):
        built.step(batch, 0, 10)
    assert first_not_finite(built, batch, 0) == NotFinite("output", name, micro)


def test_a_gradient_that_is_not_finite_is_named_by_the_module_that_received_it() -> None:
    built, batch = stepper(), ids()
    batch[3, 3] = 40_000
    spoil(built, "blocks.1.attention", 40_000, forward=False)
    with pytest.raises(NotFiniteError):
        built.step(batch, 0, 10)
    found = first_not_finite(built, batch, 0)
    assert found.what == "gradient"
    assert found.micro_batch == 1
    assert found.name.startswith("blocks.1.attention")


def test_a_weight_that_is_not_finite_is_named() -> None:
    trainer = stepper()
    with torch.no_grad():
        trainer.model.get_parameter("blocks.1.mlp.fc.weight")[0, 0] = math.inf
    assert first_not_finite(trainer, ids(), 0) == NotFinite("weight", "blocks.1.mlp.fc.weight")


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_finite_step_names_nothing_and_is_unchanged(dropout: float) -> None:
    built, other = stepper(dropout), stepper(dropout)
    assert first_not_finite(built, ids(), 0) == NotFinite("nothing")
    assert built.step(ids(), 0, 10) == other.step(ids(), 0, 10)


def test_a_second_fault_that_recurs_is_called_repeatable() -> None:
    built, log = stepper(), FaultLog()

    def explained(iteration: int) -> NotFiniteError:
        return log.explain(NotFiniteError("x"), built, ids(), iteration, list(range(6)))

    assert explained(7).retry
    assert explained(5).retry  # going on from a checkpoint before both
    log.passed(6)
    assert [fault.repeated for fault in log.faults] == [None, False]
    second = explained(7)
    assert not second.retry
    assert "repeatable" in str(second)
    assert [fault.repeated for fault in log.faults] == [True, False]


class Overflowing(CausalSelfAttention):
    def attend(self, q_BHTD: torch.Tensor, k_BHTD: torch.Tensor, v_BHTD: torch.Tensor) -> torch.Tensor:
        return self.fused(q_BHTD, k_BHTD, v_BHTD) * math.inf


class OverflowingBetween(CausalSelfAttention):
    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return self.proj(self.qkv(x_BTC)[..., : x_BTC.shape[-1]] / 0.0)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Overflowing, "blocks.1.attention.attend"), (OverflowingBetween, "blocks.1.attention")],
)
def test_a_custom_attention_is_named_with_its_line(kind: type[CausalSelfAttention], name: str) -> None:
    built = stepper()
    attention = built.model.blocks[1].attention
    attention.__class__ = kind
    found = first_not_finite(built, ids(), 0)
    assert (found.what, found.name) == ("output", name)
    method = kind.attend if "attend" in vars(kind) else kind.forward
    assert found.source == f"tests/gpt2/test_nan_debug.py:{method.__code__.co_firstlineno}"
    assert "attend" not in vars(attention)
    error = FaultLog().explain(
        NotFiniteError("iteration 0: loss nan; fix: a smaller rate"), built, ids(), 0, [*range(8)]
    )
    assert f"({found.source})" in str(error)
    assert str(error).count("fix: ") == 1
    assert "fix: keep tests/gpt2/test_nan_debug.py" in str(error)


def test_every_fault_is_retried_once_up_to_a_limit_a_run() -> None:
    built, log, tried = stepper(), FaultLog(), []
    for iteration in (7, 9, 12, 15, 20):
        log = FaultLog(log.faults)  # as read from the record by the next process
        tried.append(log.explain(NotFiniteError("x"), built, ids(), iteration, list(range(6))).retry)
        log.passed(iteration + 1)
    assert tried == [True] * MAX_RETRIES + [False] * (5 - MAX_RETRIES)
    assert [fault.repeated for fault in log.faults] == [False] * 5
