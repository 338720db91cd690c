"""Optimizer steps, custom functions and linear algebra of a recorded step against float64; the counts add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numerics import NumericsError, Recorder, RecorderConfig, check_operation
from numerics.oracle.beside import check_optimizer
from numerics.oracle.check import Oracle
from numerics.oracle.command import check_all
from numerics.oracle.operation import Operation, reference
from numerics.oracle.record import operations
from numerics.oracle.report import OracleReport, results_json, write_report
from numerics.oracle.results import Check, Skipped
from numerics.record.captured_steps import MOST

X = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))


class Doubled(torch.autograd.Function):
    """Twice the sine, with the right derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x.sin()

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.factor * x.cos() * received[0], None


class HalfBackward(Doubled):
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
    def __init__(self, custom: type[torch.autograd.Function] = Doubled) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.custom = custom

    def forward(self, x: Tensor) -> Tensor:
        x = self.custom.apply(self.fc(x), 2.0)
        x = Called.apply(x, torch.abs)
        x = F.dropout(x, 0.5)
        gram = x.T @ x + torch.eye(12)
        return self.norm(torch.linalg.solve(gram, x.T).T + torch.linalg.eigh(gram)[0])


class WrongAdamW(torch.optim.AdamW):
    """Forget the correction of the second moment."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                state = self.state[value]
                moment = state.setdefault("exp_avg", torch.zeros_like(value))
                square = state.setdefault("exp_avg_sq", torch.zeros_like(value))
                moment.lerp_(value.grad, 0.1)
                square.mul_(0.999).addcmul_(value.grad, value.grad, value=0.001)
                value.data.addcdiv_(moment, square.sqrt().add_(1e-8), value=-group["lr"])


def recorded(
    folder: Path, optimizer: Callable[[Model], torch.optim.Optimizer], custom: Any = Doubled, **options: Any
) -> Path:
    torch.manual_seed(0)
    model = Model(custom)
    stepper = optimizer(model)
    recorder = Recorder(
        RecorderConfig(dump_path=str(folder), **({"level": "mix", "task": "tensor"} | options))
    )
    for _ in range(2):
        recorder.start(model)
        model(X).square().sum().backward()
        recorder.stop()
        stepper.step()
        recorder.step()
        stepper.zero_grad()
    return folder


def checked(folder: Path, **options: Any) -> OracleReport:
    return check_all(operations(folder), "test", "cpu", extremes=False, **options)


def adamw(**options: Any) -> Callable[[Model], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def wrong_names(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if check.wrong}


@pytest.mark.parametrize(
    "options", [{}, {"fused": True}, {"foreach": True}, {"amsgrad": True}], ids=lambda part: str(part)
)
def test_the_steps_of_a_record_are_checked(options: dict[str, Any], tmp_path: Path) -> None:
    report = checked(recorded(tmp_path, adamw(**options)))
    assert [check.text for check in report.checks if check.wrong] == []
    steps = [check for check in report.checks if check.label == "AdamW step"]
    names = {check.name.partition(", ")[2] for check in steps}
    assert names == {"fc.weight", "fc.bias", "norm.weight", "norm.bias"}
    assert {check.how for check in steps} == {"device", "recorded"}
    assert {check.part for check in steps} >= {"result 0", "result 1", "result 2"}


def test_the_counts_of_a_record_add_up(tmp_path: Path) -> None:
    for level in ("mix", "L1", "L0"):
        folder = recorded(tmp_path / level, adamw(), level=level)
        report = checked(folder)
        found = list(operations(folder))
        assert len({each.name for each in found}) == len(found) == len(report.recorded)
        content = results_json(report)["operations"]
        assert content["recorded"] == content["checked"] + sum(content["not_checked"].values()) == len(found)
        assert content["checked"] == len({check.name for check in report.checks})
        assert "nothing to compare" not in content["not_checked"]
        calls = json.loads((folder / "step0/rank0/dump.json").read_text())["data"]
        forward = [name for name in calls if "forward" in name]
        beside = [each for each in found if each.name.startswith("step0/") and "Function.C" in each.name]
        assert sum(each.name.startswith("step0/rank0/") for each in found) == len(forward) + 4 + 2, level
        assert [each.reason for each in beside if isinstance(each, Skipped)] == [
            "custom function with an argument of type builtin_function_or_method"
        ]
        assert report.counts in str(write_text(report, tmp_path))


def write_text(report: OracleReport, folder: Path) -> str:
    from numerics.oracle.report import report_document
    from pages.document import render_terminal

    write_report(report, folder / "o")
    return render_terminal(report_document(report))


def test_a_wrong_update_of_one_parameter_is_named(tmp_path: Path) -> None:
    """The recorded result of the step is measured, so that a fault of a multi-tensor kernel in one tensor is found."""

    def optimizer(model: Model) -> torch.optim.Optimizer:
        stepper = torch.optim.AdamW(model.parameters(), lr=1e-2)
        stepper.register_step_post_hook(lambda *unused: model.norm.bias.data.view(-1)[3].mul_(1.01))
        return stepper

    folder = recorded(tmp_path, optimizer)
    names = {name.partition(", ")[2] for name in wrong_names(checked(folder).checks)}
    assert names == {"norm.bias"}


@pytest.mark.parametrize("kind", ["SGD", "Adam", "RMSprop", "Adafactor", "NAdam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_optimizers_are_within_rounding(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(9, 7).to(dtype)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **({"momentum": 0.9} if kind == "SGD" else {}))
    for _ in range(2):
        model(torch.randn(4, 9).to(dtype)).float().square().sum().backward()
        checks = check_optimizer(optimizer, "cpu", model)
        before = [value.detach().clone() for value in model.parameters()]
        assert all(torch.equal(old, value) for old, value in zip(before, model.parameters(), strict=True))
        assert [check.text for check in checks if check.wrong] == []
        optimizer.step()


def test_an_optimizer_that_differs_from_its_class_in_float64_is_wrong(tmp_path: Path) -> None:
    """An optimizer of a user's is compared with itself in float64; a step in bfloat16 within it is found."""

    class Narrow(WrongAdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for value in group["params"]:
                    if value.dtype != torch.float64:
                        value.grad = value.grad.bfloat16().to(value.dtype)
            super().step()

    model = nn.Linear(9, 7)
    model(torch.randn(4, 9)).square().sum().backward()
    assert wrong_names(check_optimizer(WrongAdamW(model.parameters()), "cpu")) == set()
    assert wrong_names(check_optimizer(Narrow(model.parameters()), "cpu")) != set()


def test_of_a_large_parameter_the_first_rows_are_checked() -> None:
    value = nn.Parameter(torch.randn(MOST // 64 + 5, 128))
    value.grad = torch.randn_like(value)
    checks = check_optimizer(torch.optim.SGD([value], lr=0.1), "cpu")
    assert {check.measured.elements for check in checks} == {MOST}
    assert wrong_names(checks) == set()


def test_steps_that_cannot_be_checked_say_why() -> None:
    value = nn.Parameter(torch.randn(3))
    with pytest.raises(NumericsError, match="no parameter has a gradient"):
        check_optimizer(torch.optim.SGD([value]))
    value.grad = torch.randn(3).to_sparse()
    with pytest.raises(NumericsError, match="sparse"):
        check_optimizer(torch.optim.SGD([value]))


def test_a_custom_function_is_checked_forward_and_backward(tmp_path: Path) -> None:
    report = checked(recorded(tmp_path / "a", adamw()))
    mine = [check for check in report.checks if check.label == "Function.Doubled"]
    assert {check.direction for check in mine} == {"forward", "backward"}
    assert [check.text for check in mine if check.wrong] == []
    report = checked(recorded(tmp_path / "b", adamw(), HalfBackward))
    wrong = [check for check in report.checks if check.wrong and check.label.startswith("Function")]
    assert {(check.label, check.direction) for check in wrong} == {("Function.HalfBackward", "backward")}


def test_the_step_and_its_custom_function_are_as_without_a_recorder(tmp_path: Path) -> None:
    original = torch.autograd.Function.__dict__["apply"]
    found = []
    for options in ({"step": (7,)}, {}):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        recorder = Recorder(RecorderConfig(dump_path=str(tmp_path), level="mix", task="tensor", **options))
        recorder.start(model)
        model(X).square().sum().backward()
        recorder.stop()
        assert torch.autograd.Function.__dict__["apply"] is original
        optimizer.step()
        recorder.step()
        found.append([value.detach().clone() for value in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# -- linear algebra


def matrix(condition: float, count: int = 3, size: int = 10) -> Tensor:
    draws = torch.Generator().manual_seed(2)
    U, _, V = torch.linalg.svd(torch.randn(count, size, size, generator=draws, dtype=torch.float64))
    return (U * torch.logspace(0, -torch.tensor(condition).log10(), size, dtype=torch.float64) @ V).float()


RIGHT = torch.randn(3, 10, 4, generator=torch.Generator().manual_seed(3))
LINALG: dict[str, Callable[[Tensor], Any]] = {
    "solve": lambda A: torch.linalg.solve(A, RIGHT.to(A.dtype)),
    "inv": torch.linalg.inv,
    "det": torch.linalg.det,
    "slogdet": torch.linalg.slogdet,
    "cholesky": lambda A: torch.linalg.cholesky(A @ A.mT + torch.eye(10, dtype=A.dtype)),
    "lstsq": lambda A: torch.linalg.lstsq(A[..., :6], RIGHT.to(A.dtype)).solution,
    "eigvalsh": lambda A: torch.linalg.eigvalsh(A + A.mT),
    "svdvals": torch.linalg.svdvals,
    "pinv": torch.linalg.pinv,
    "matrix_exp": torch.linalg.matrix_exp,
}


@pytest.mark.parametrize("name", LINALG)
def test_batched_linear_algebra_is_within_rounding(name: str) -> None:
    for condition in (3.0, 300.0, 1e4):
        checks = check_operation(LINALG[name], [matrix(condition)], name=name, device="cpu")
        usual = [check for check in checks if check.values != "extreme"]
        assert [check.text for check in usual if check.wrong] == [], condition


@pytest.mark.parametrize("condition", [3.0, 1e4])
def test_a_solution_through_bfloat16_is_wrong(condition: float) -> None:
    def narrow(A: Tensor) -> Tensor:
        B = RIGHT.to(A.dtype)
        rough = A if A.dtype == torch.float64 else (A * (1 + 2.0**-9 * torch.sign(A))).to(A.dtype)
        return torch.linalg.solve(rough, B)

    assert wrong_names(check_operation(narrow, [matrix(condition)], name="solve", device="cpu"))


def test_the_bound_has_the_condition_number_and_an_ill_conditioned_matrix_is_named() -> None:
    ratios = []
    for condition in (3.0, 1e4):
        oracle = Oracle(torch.device("cpu"), extremes=False)
        exact = torch.linalg.solve(matrix(condition).double(), RIGHT.double())
        shifted = exact * (1 + 2e-6)
        (check,) = oracle.check(
            Operation("s", "solve", torch.linalg.solve, [matrix(condition), RIGHT], results=[shifted.float()],
                      on_device=False)
        )  # fmt: skip
        ratios.append(check.measured.ratio)
    assert ratios[0] > 20 * ratios[1]
    oracle = Oracle(torch.device("cpu"))
    assert oracle.check(Operation("s", "Torch.linalg.solve", torch.linalg.solve, [matrix(1e7), RIGHT])) == []
    assert [skip.reason.partition(":")[0] for skip in oracle.skipped] == ["ill-conditioned"]
    with pytest.raises(NumericsError, match=r"a condition number of 1\.1e\+07"):
        check_operation(torch.linalg.inv, [matrix(1e7)], name="inv", device="cpu")


def test_recorded_decompositions_are_checked_by_what_is_unique(tmp_path: Path) -> None:
    A = matrix(30.0)
    A.requires_grad_()
    recorder = Recorder(RecorderConfig(dump_path=str(tmp_path), level="L1", task="tensor"))
    recorder.start()
    R = torch.linalg.qr(A)[1]
    values = torch.linalg.eigh(A + A.mT)[0]
    S = torch.linalg.svd(A)[1]
    (R.sum() + values.sum() + S.sum() + torch.linalg.inv(A).sum()).backward()
    recorder.step()
    report = checked(tmp_path)
    names = {check.label for check in report.checks}
    assert names >= {f"Torch.linalg.{name}" for name in ("qr", "eigh", "svd", "inv")}
    assert [check.text for check in report.checks if check.wrong] == []


def test_the_error_of_a_matrix_is_relative_to_its_norm() -> None:
    """A stable algorithm moves a small eigenvalue by u times the norm, which errors of each element would not do."""
    known = reference(
        Operation("e", "eigvalsh", torch.linalg.eigvalsh, [torch.diag(torch.tensor([1e4, 1e-4]))])
    )
    known.extend(4)
    assert 1e-5 < float(known.sigma("forward", 0)[0]) < 1e-1
