"""Arguments that are not tensors are compared: counters, clocks and settings are named with their values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from referee.numerics import NumericsError, repeat_step
from referee.numerics.repeat import repeat_evidence as causes
from referee.numerics.repeat.repeat_evidence import Repetition

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def repeated(change: Callable[[Tensor, int], Tensor], times: int = 3, threads: int = 1) -> Repetition:
    """Repeat a step whose result passes a function of the result and of the number of the call."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    calls: list[int] = []

    def step() -> Tensor:
        calls.append(1)
        loss: Tensor = change(model(X), len(calls)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return repeat_step(step, {"model": model, "optimizer": optimizer}, times=times, threads=threads)


@pytest.mark.parametrize(
    ("change", "operation", "argument"),
    [
        (lambda y, n: y * (1 + 1e-3 * n), "aten.mul.Tensor", "other"),
        (lambda y, n: y * torch.full((1,), 0.5 * n), "aten.full.default", "fill_value"),
        (lambda y, n: y + torch.arange(1, 5)[torch.arange(4) + n % 2 - 1], "aten.add.Tensor", "other"),
        (lambda y, n: y.double() if n % 2 else y.half(), "aten._to_copy.default", "dtype"),
        (lambda y, n: torch.nn.functional.gelu(y, approximate="tanh" if n % 2 else "none"), "aten.gelu.default",
         "approximate"),
        (lambda y, n: y.clamp(min=None if n % 2 else 0.1, max=0.3), "aten.clamp.default", "min"),
    ],
)  # fmt: skip
def test_a_python_value_that_differs_is_named(
    change: Callable[[Tensor, int], Tensor], operation: str, argument: str
) -> None:
    found = repeated(change)
    finding = found.causes[0]
    assert finding.name == causes.PYTHON, found.rows()
    assert found.is_fault
    assert finding.operation
    assert finding.operation.name == operation
    assert f"argument {argument} of {operation}" in finding.difference


@torch.library.custom_op("numerics_test::changing_sum", mutates_args=())
def changing_sum(x: Tensor) -> Tensor:
    """Return another sum in each call."""
    changing_sum.calls = getattr(changing_sum, "calls", 0) + 1  # type: ignore[attr-defined]
    return x.sum() + changing_sum.calls * 1e-3  # type: ignore[attr-defined]


def test_a_value_that_python_read_from_a_tensor_leads_to_the_operation_that_made_it() -> None:
    found = repeated(lambda y, n: y * changing_sum(y.detach()).item())
    finding = found.causes[0]
    assert finding.name != causes.PYTHON
    assert finding.operation
    assert finding.operation.name == "numerics_test.changing_sum.default"


def test_numpys_generator_is_restored_and_a_lazy_model_is_refused() -> None:
    found = repeated(lambda y, n: y * float(np.random.rand()))
    assert not found.is_fault, found.rows()
    with pytest.raises(
        NumericsError, match=r"model has parameters without a shape; fix: call it once before"
    ):
        repeat_step(lambda: None, {"model": nn.LazyLinear(3)}, times=2)
