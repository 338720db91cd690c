"""Errors of kernels."""

from typing import Any

import pytest
import torch

from bench import card_kernels as kernels
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
