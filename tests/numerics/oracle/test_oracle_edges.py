"""The check of one operation: defaults that depend on the dtype, missing gradients, modules, what cannot be checked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numerics import NumericsError, Recorder, RecorderConfig, check_operation
from numerics.oracle.check import Oracle
from numerics.oracle.operation import Operation
from numerics.oracle.record import operations
from numerics.oracle.results import Check, Skipped


def wrong(checks: list[Check]) -> list[str]:
    return [check.text for check in checks if check.wrong]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- rms_norm without eps takes that of its dtype

SMALL = draw(8, 64) * 1e-4  # its squares are below the eps of float32
RMS_NORMS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "in a function": (lambda x: F.rms_norm(x, (64,)) * 2, [SMALL]),
    "eps=None": (lambda x: F.rms_norm(x, (64,), eps=None), [SMALL]),
    "module": (nn.RMSNorm(64), [SMALL]),
    "torch": (torch.rms_norm, [SMALL, [64]]),
    "aten": (torch.ops.aten.rms_norm, [SMALL, [64], None, None]),
    "aten.default": (torch.ops.aten.rms_norm.default, [SMALL, [64]]),
    "aten, fused": (torch.ops.aten._fused_rms_norm, [SMALL, [64], None, None]),
    "bfloat16": (nn.RMSNorm(64).bfloat16(), [SMALL.bfloat16()]),
    "eps": (lambda x: F.rms_norm(x, (64,), None, 1e-3), [SMALL]),
}


@pytest.mark.parametrize("name", RMS_NORMS)
def test_rms_norm_is_within_rounding(name: str) -> None:
    assert wrong(check_operation(*RMS_NORMS[name])) == []


def test_the_eps_of_another_dtype_is_found() -> None:
    found = wrong(
        check_operation(
            lambda x: F.rms_norm(x, (64,), eps=torch.finfo(torch.float64).eps),
            [SMALL],
            reference=lambda x: F.rms_norm(x, (64,)),
        )
    )
    assert any("result 0, device:" in text for text in found)


@pytest.mark.parametrize("level", ["L1", "mix"])
def test_a_recorded_rms_norm_is_within_rounding(level: str, tmp_path: Path) -> None:
    recorder = Recorder(RecorderConfig(dump_path=str(tmp_path), task="tensor", level=level))  # type: ignore[arg-type]
    model = nn.Sequential(nn.RMSNorm(64))
    recorder.start(model)
    model(SMALL.clone().requires_grad_()).square().mean().backward()
    recorder.stop()
    recorder.step()
    oracle = Oracle(torch.device("cpu"))
    for found in operations(tmp_path / "step0"):
        if isinstance(found, Operation):
            oracle.check(found)
    assert wrong(oracle.checks) == []
    assert any("norm" in check.label.lower() for check in oracle.checks)


# -- gradients and dtypes


def test_a_missing_gradient_is_found() -> None:
    x, y = draw(3, 4), draw(3, 4, seed=1)
    found = wrong(check_operation(lambda a, b: a * b.detach(), [x, y], reference=lambda a, b: a * b))
    assert [text.partition("> ")[2] for text in found] == ["backward, gradient 1, device: no gradient"]
    found = wrong(check_operation(lambda x: F.gelu(x).detach(), [x], reference=F.gelu))
    assert [text.partition("> ")[2] for text in found] == ["backward, gradient 0, device: no gradient"]


def test_no_gradient_and_a_gradient_of_zeros_are_equal() -> None:
    checks = check_operation(lambda x: x.detach().round(), [draw(3, 4)], reference=torch.round)
    assert wrong(checks) == []


def test_another_dtype_of_the_result_is_found() -> None:
    found = wrong(check_operation(lambda x: x.bfloat16() * 2, [draw(3, 4)], reference=lambda x: x * 2))
    assert "dtype torch.bfloat16, the reference returns torch.float32" in found[0]


def test_a_reference_may_compute_in_float64() -> None:
    checks = check_operation(
        torch.softmax, [draw(3, 4), -1], reference=lambda x, dim: x.double().softmax(dim)
    )
    assert wrong(checks) == []


@pytest.mark.parametrize("function", [torch.fft.fft, torch.fft.rfft, torch.fft.fft2, torch.fft.ifft])
@pytest.mark.parametrize("columns", [64, 1000])
def test_a_fourier_transform_is_within_rounding(function: Callable[..., Any], columns: int) -> None:
    (check,) = check_operation(function, [draw(16, columns)])
    assert not check.wrong
    assert 0.05 < check.units < 5
    other = check_operation(lambda x: function(x * (1 + 1e-5)), [draw(16, columns)], reference=function)
    assert len(wrong(other)) == 1


def test_the_inverse_of_a_fourier_transform_is_within_rounding() -> None:
    assert wrong(check_operation(torch.fft.irfft, [torch.complex(draw(4, 33), draw(4, 33, seed=1))])) == []


# -- in-place operations, and modules


@pytest.mark.parametrize("function", [lambda x: x.mul_(2), lambda x: x.t().exp_() + 1, torch.Tensor.add_])
def test_an_overwritten_input_is_a_copy(function: Callable[..., Any]) -> None:
    inputs = [draw(3, 3), draw(3, 3, seed=1)][: 2 if function is torch.Tensor.add_ else 1]
    before = copy.deepcopy(inputs)
    checks = check_operation(function, inputs)
    assert wrong(checks) == []
    assert "backward" in {check.direction for check in checks}
    assert all(map(torch.equal, inputs, before))


def test_an_overwritten_index_is_a_copy() -> None:
    index = torch.tensor([0, 1])
    assert wrong(check_operation(lambda x, index: x[index.add_(1)], [draw(9, 2), index])) == []
    assert index.tolist() == [0, 1]


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm1d(64), nn.BatchNorm1d(64).eval(), nn.Linear(64, 3), nn.GELU(), nn.LayerNorm(64)],
    ids=str,
)
def test_a_module_is_checked_with_its_parameters_and_is_not_changed(module: nn.Module) -> None:
    before = copy.deepcopy(module.state_dict())
    checks = check_operation(module, [draw(8, 64)])
    assert wrong(checks) == []
    parts = {check.part for check in checks if check.direction == "backward"}
    assert len(parts) == 1 + len(list(module.parameters()))
    after = module.state_dict()
    assert all(
        torch.equal(after[key], value) and after[key].dtype == value.dtype for key, value in before.items()
    )
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_module_is_compared_with_a_module_and_with_a_function() -> None:
    gelu, x = nn.GELU(approximate="tanh"), draw(8, 64)
    for right, expected in ((F.gelu, True), (nn.GELU(), True), (nn.GELU("tanh"), False)):
        assert bool(wrong(check_operation(gelu, [x], reference=right))) == expected
    linear = nn.Linear(64, 3)
    assert wrong(check_operation(linear, [x], reference=copy.deepcopy(linear))) == []
    assert wrong(check_operation(linear, [x], reference=nn.Linear(64, 3)))
    assert wrong(check_operation(nn.Linear(64, 3).bfloat16(), [x.bfloat16()])) == []


def test_a_module_without_a_copy_is_one_line() -> None:
    module = nn.Linear(3, 3)
    module.kept = module.weight * 2  # type: ignore[assignment]
    with pytest.raises(NumericsError, match=r"^Linear cannot be checked: no deep copy: .*; fix: .*"):
        check_operation(module, [draw(2, 3)])


# -- what cannot be checked

REASONS: dict[str, tuple[Callable[..., Any], Tensor, str]] = {
    "an error": (
        lambda x: x * (1 // 0),
        draw(3),
        "it raised ZeroDivisionError: integer division or modulo by zero;",
    ),
    "nothing": (lambda x: None, draw(3), "it returns no tensor;"),
    "empty": (lambda x: x * 2, draw(0, 3), "result 0 has no elements;"),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_is_one_line(name: str) -> None:
    function, x, reason = REASONS[name]
    with pytest.raises(NumericsError) as found:
        check_operation(function, [x])
    assert f"cannot be checked: {reason} fix: " in str(found.value)
    assert "\n" not in str(found.value)


def test_an_error_of_the_reference_is_named() -> None:
    with pytest.raises(NumericsError, match="cannot be checked: the reference raised ZeroDivisionError: "):
        check_operation(lambda x: x, [draw(3)], reference=lambda x: x * (1 // 0))


@pytest.mark.parametrize("function", [torch.linalg.solve, torch.linalg.inv])
@pytest.mark.parametrize("size", [4, 16, 48])
def test_an_extreme_that_is_refused_is_skipped_with_its_reason(
    function: Callable[..., Any], size: int
) -> None:
    inputs = [torch.eye(size) + 0.1 * draw(size, size), draw(size, size, seed=1)]
    inputs = inputs[: 2 if function is torch.linalg.solve else 1]
    assert wrong(check_operation(function, inputs)) == []
    oracle = Oracle(torch.device("cpu"))
    oracle.check(Operation("call", "call", function, inputs))
    reasons = [skip.reason for skip in oracle.skipped if isinstance(skip, Skipped)]
    assert any(reason.startswith("zeros: _LinAlgError: ") for reason in reasons)


def test_a_division_by_a_norm_of_subnormal_numbers_is_no_fault() -> None:
    checks = check_operation(lambda v, g: torch._weight_norm(v, g, 0), [draw(8, 16), draw(8, 1, seed=1)])
    assert wrong(checks) == []
    assert any("squares of subnormal inputs are zero" in check.remark for check in checks)
