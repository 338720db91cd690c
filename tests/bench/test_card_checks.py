"""Errors of kernels, and of the gradients of gates."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench import card_kernels as kernels
from bench.card_checks import DIFFERS, PASS, CheckedDevice, gate_checks
from bench.runner import BenchWorker
from runtime.gpu_specs import TARGETS
from runtime.resolved_target import ResolvedTarget

H200 = ResolvedTarget(
    TARGETS["h200"], "cuda:0", "NVIDIA H200", 150_000_000_000, "bfloat16", "cudnn", None, "2.13.0", None
)


def test_measured_errors_see_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ("cpu", "float32", "flash", (2, 2, 20, 8))
    assert max(kernels.measure_kernel(*case).errors) < 1e-5
    right = kernels.attend
    calls: list[int] = []

    def wrong(x: torch.Tensor, grad: torch.Tensor, heads: int) -> Any:
        calls.append(1)
        y, gradient = right(x, grad, heads)
        return (y, gradient) if len(calls) == 1 else (y * 1.5, gradient + len(calls))

    monkeypatch.setattr(kernels, "attend", wrong)
    kernels.problem.cache_clear()
    result = kernels.measure_kernel(*case)
    assert result.errors[0] == pytest.approx(0.5, rel=1e-3)
    assert result.repeats == (True, False)


@pytest.mark.parametrize(
    ("bfloat16", "compiled", "verdicts"),
    [
        (1.09, 1.10, [PASS] * 4),  # rounding of bfloat16, alike in both
        (
            1.00,
            1.07,
            [PASS, PASS, DIFFERS, PASS],
        ),  # another kernel than eager code's, hidden by the wider limit
        (1.30, 1.30, [PASS, DIFFERS, PASS, DIFFERS]),
    ],
)
def test_a_compiled_step_is_compared_with_the_eager_one_and_bfloat16_with_float64(
    bfloat16: float, compiled: float, verdicts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"float64": 1.0, "float32": 1.0, "bfloat16": bfloat16, "bfloat16 compiled": compiled}
    monkeypatch.setattr(BenchWorker, "__init__", lambda *_: None)
    monkeypatch.setattr(BenchWorker, "__exit__", lambda *_: None)

    def call(worker: object, function: object, *arguments: Any, limit_seconds: float) -> list[float]:
        return [4.0, sizes[arguments[-1]], 0.0]

    monkeypatch.setattr(BenchWorker, "call", call)
    assert [check.verdict for check in gate_checks(CheckedDevice(H200, Path()))] == verdicts
