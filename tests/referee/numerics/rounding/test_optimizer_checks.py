"""Optimizer steps and custom functions against float64: torch's are within rounding, faults are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from referee.numerics import Recorder, RecorderConfig
from referee.numerics.oracle.recorded_operations import operations
from referee.numerics.record.captured_steps import before_step
from referee.numerics.rounding.operation_checks import Check, Oracle
from referee.numerics.rounding.optimizer_checks import operation_of
from tests.referee.numerics.rounding.wrong_kernels import draw


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x.sin()

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.factor * x.cos() * received[0], None


class HalfBackward(Sine):
    """The same, with a backward that rounds to bfloat16."""

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        exact = ctx.factor * x.cos() * received[0]
        return (exact if x.dtype == torch.float64 else exact.bfloat16().to(x.dtype)), None


class Called(torch.autograd.Function):
    """Take a function, which cannot be recorded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> Any:
        return received[0], None


class Model(nn.Module):
    def __init__(self, custom: type[torch.autograd.Function] = Sine) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(12, 12), nn.LayerNorm(12)
        self.custom = custom

    def forward(self, x: Tensor) -> Tensor:
        x = Called.apply(self.custom.apply(self.fc(x), 2.0), torch.abs)
        x = F.dropout(x, 0.5)
        return self.norm(torch.linalg.solve(x.T @ x + torch.eye(12), x.T).T)


def adamw(**options: Any) -> Callable[[Model], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def recorded(
    folder: Path, optimizer: Callable[[Model], torch.optim.Optimizer], custom: Any = Sine, level: Any = "mix"
) -> Oracle:
    """Record two steps and check them."""
    torch.manual_seed(0)
    model = Model(custom)
    stepper = optimizer(model)
    recorder = Recorder(RecorderConfig(dump_path=str(folder), level=level, task="tensor"))
    for _ in range(2):
        recorder.start(model)
        model(draw(8, 12)).square().sum().backward()
        recorder.stop()
        stepper.step()
        recorder.step()
        stepper.zero_grad()
    oracle = Oracle(torch.device("cpu"))
    for operation in operations(folder):
        oracle.check(operation)
    return oracle


def next_step(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Check]:
    """Check the next step of an optimizer, without carrying it out."""
    oracle = Oracle(torch.device("cpu"))
    for step in before_step(optimizer, {id(value): name for name, value in model.named_parameters()}):
        oracle.check(operation_of(step))
    return oracle.checks


def wrong_names(checks: list[Check]) -> set[str]:
    return {check.name.rpartition(", ")[2] for check in checks if check.wrong}


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"amsgrad": True}], ids=str)
def test_the_steps_of_a_record_are_checked(options: dict[str, Any], tmp_path: Path) -> None:
    report = recorded(tmp_path, adamw(**options))
    assert wrong_names(report.checks) == set()
    steps = [check for check in report.checks if check.label == "AdamW step"]
    names = {check.name.partition(", ")[2] for check in steps}
    assert names == {"fc.weight", "fc.bias", "norm.weight", "norm.bias"}
    assert {check.how for check in steps} >= {"device", "recorded"}


@pytest.mark.parametrize("level", ["mix", "L1", "L0"])
def test_the_counts_of_a_record_add_up(level: str, tmp_path: Path) -> None:
    report = recorded(tmp_path, adamw(), level=level)
    checked = {check.name for check in report.checks}
    assert len(checked) + report.not_checked.total() == len(report.names)
    assert "nothing to compare" not in report.not_checked
    custom = [skip.reason for skip in report.skipped if "Function.Called" in skip.name]
    assert custom == ["custom function with an argument of type builtin_function_or_method"] * 2
    if level != "L0":
        assert [skip.reason for skip in report.skipped if "dropout" in skip.name.lower()] == ["random"] * 2


def test_a_wrong_update_of_one_parameter_is_named(tmp_path: Path) -> None:
    """The recorded result of the step is measured, so that a fault of a multi-tensor kernel in one tensor is found."""

    def optimizer(model: Model) -> torch.optim.Optimizer:
        stepper = torch.optim.AdamW(model.parameters(), lr=1e-2)
        stepper.register_step_post_hook(lambda *unused: model.norm.bias.data.view(-1)[3].mul_(1.01))
        return stepper

    assert wrong_names(recorded(tmp_path, optimizer).checks) == {"norm.bias"}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("SGD", torch.bfloat16),
        ("Adam", torch.float32),
        ("RMSprop", torch.bfloat16),
        ("Adafactor", torch.float32),
    ],
    ids=str,
)
def test_torchs_optimizers_are_within_rounding(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(9, 7).to(dtype)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **({"momentum": 0.9} if kind == "SGD" else {}))
    for _ in range(2):
        model(torch.randn(4, 9).to(dtype)).float().square().sum().backward()
        before = [value.detach().clone() for value in model.parameters()]
        assert wrong_names(next_step(optimizer, model)) == set()
        assert all(torch.equal(old, value) for old, value in zip(before, model.parameters(), strict=True))
        optimizer.step()


def test_a_custom_function_is_checked_forward_and_backward(tmp_path: Path) -> None:
    report = recorded(tmp_path / "a", adamw())
    mine = [check for check in report.checks if check.label == "Function.Sine"]
    assert {check.direction for check in mine} == {"forward", "backward"}
    report = recorded(tmp_path / "b", adamw(), HalfBackward)
    wrong = [check for check in report.checks if check.wrong and check.label.startswith("Function")]
    assert {(check.label, check.direction) for check in wrong} == {("Function.HalfBackward", "backward")}


def test_the_fused_sgd_of_torch_on_a_cpu_is_wrong_in_bfloat16() -> None:
    """Its momentum is wrong in torch 2.11 to 2.13; without `fused` it is right."""
    wrong = {}
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(33, 17).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        for _ in range(2):
            model(torch.randn(8, 33).bfloat16()).float().square().mean().backward()
            checks = next_step(optimizer, model)
            optimizer.step()
        wrong[fused] = wrong_names(checks)
    assert "weight" in wrong[True]
    assert wrong[False] == set()
