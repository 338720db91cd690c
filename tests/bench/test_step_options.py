"""Options of the step give the loss and the gradients of the default step, within their rounding."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import case_step
from bench.case_step import OPTIONS, make_stepper
from bench.cases import Sizes
from gpt2 import loss
from gpt2.training_step import Stepper
from runtime.resolve import ResolvedTarget, resolve
from runtime.settings import ModelConfig, TargetConfig

COMPILE = torch.compile
SIZES = Sizes("small", 2, 2, 32, 16)
TOLERANCE = {
    "chunk16k": 1e-3,
    "chunk32k": 1e-3,
    "f32grad": 1e-2,
    "gather": 1e-2,
    "bf16": 3e-2,
}  # of a gradient's norm


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the CPU have mm's out_dtype, and torch.compile no code generator; restore what options change."""
    mm = torch.mm

    def mm_with_dtype(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
        return mm(a.to(out_dtype), b.to(out_dtype)) if out_dtype else mm(a, b, **rest)

    monkeypatch.setattr(torch, "mm", mm_with_dtype)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(
        case_step,
        "model_config",
        lambda sizes: ModelConfig("small", 2, 2, 32, 16, 0.0, vocabulary=101, padded_vocabulary=128),
    )
    monkeypatch.setattr(loss, "CHUNK_ROWS", dict(loss.CHUNK_ROWS))
    monkeypatch.setattr(loss, "_add_product", loss._add_product)
    yield
    torch.compiler.reset()


def stepper_of(case: str) -> Stepper:
    target: ResolvedTarget = resolve(TargetConfig("cpu", "bfloat16", False, 0, "auto", False))
    return make_stepper(SIZES, case, 3, target, effective=6)


def gradients(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Return the loss and the gradients of a step with two micro-batches."""
    found: dict[str, Tensor] = {}

    def apply(total: Tensor, norm: Tensor, iteration: int, iterations: int) -> None:
        found["loss"] = total / stepper.batch.accumulation
        found.update((name, p.grad) for name, p in stepper.model.named_parameters() if p.grad is not None)

    monkeypatch.setattr(stepper, "_apply", apply)
    ids_ET = torch.randint(101, (6, 17), generator=torch.Generator().manual_seed(0))
    stepper.step(ids_ET, 0, 10)
    return found


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_changes_gradients_by_rounding_only(
    simulated: None, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    default = gradients(stepper_of("RALEARN"), monkeypatch)
    ours = gradients(stepper_of(f"RALEARN+{option}"), monkeypatch)
    assert ours.keys() == default.keys()
    assert float(ours["loss"]) == pytest.approx(float(default["loss"]), rel=1e-3)
    for name, expected in default.items():
        if name.endswith("alternation_logit"):
            continue  # near zero at the first step, so it is rounding
        error = float((ours[name] - expected).norm() / expected.norm())
        assert error < TOLERANCE[option], (name, error)


def test_bfloat16_residuals_compile_to_one_graph_with_the_eager_numbers(
    simulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, compiled = stepper_of("B+bf16"), stepper_of("B+bf16")
    compiled._hidden = COMPILE(compiled.model.hidden, fullgraph=True, backend="aot_eager")
    ours, expected = gradients(compiled, monkeypatch), gradients(eager, monkeypatch)
    for name in expected:
        assert torch.allclose(ours[name], expected[name], rtol=2e-2, atol=1e-4), name
