"""Errors of kernels, and of gate gradients against float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import card_checks as gates
from bench import card_kernels as kernels
from bench.card_checks import CheckedDevice
from bench.runner import BenchError
from runtime.gpu_specs import TARGETS
from runtime.resolved_target import ResolvedTarget

H200 = ResolvedTarget(
    TARGETS["h200"], "cuda:0", "NVIDIA H200", 150_000_000_000, "bfloat16", "cudnn", None, "2.13.0", None
)


class Workers:
    """Answers calls by the function's name."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def __call__(self, label: str) -> "Workers":
        return self

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None: ...

    def call(self, function: Any, *arguments: Any, limit_seconds: float) -> Any:
        answer = self.answers[function.__name__](*arguments)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_measured_errors_see_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = replace(H200, target=TARGETS["cpu"], device="cpu", dtype="float32")
    assert max(kernels.measure_kernel(cpu, "flash", (2, 2, 20, 8)).errors) < 1e-5
    right = kernels.attend
    calls: list[int] = []

    def wrong(x: torch.Tensor, grad: torch.Tensor, heads: int) -> Any:
        calls.append(1)
        y, gradient = right(x, grad, heads)
        return (y, gradient) if len(calls) == 1 else (y * 1.5, gradient + len(calls))

    monkeypatch.setattr(kernels, "attend", wrong)
    result = kernels.measure_kernel(cpu, "flash", (2, 2, 20, 8))
    assert result.errors[0] == pytest.approx(0.5, rel=1e-3)
    assert result.repeats == (True, False)


def gate_lines(monkeypatch: pytest.MonkeyPatch, card: ResolvedTarget = H200, **found: Any) -> dict[str, str]:
    found = {"float64": [11.0, 3.0, 4.0], "float32": [11.0, 3.0, 4.0], "bfloat16": [11.0, 3.0, 4.1]} | found
    workers = Workers(
        gate_gradients=lambda resolved, sizes, precision: found.get(precision, [11.001, 3.0, 4.2])
    )
    monkeypatch.setattr(gates, "BenchWorker", workers)
    return {
        check.name.partition(": ")[2]: check.verdict
        for check in gates.gate_checks(CheckedDevice(card, Path("none")))
    }


def test_gate_gradients_are_compared_with_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"float32": "pass", "bfloat16": "pass", "bfloat16 compiled": "pass"}
    assert gate_lines(monkeypatch) == good
    assert gate_lines(monkeypatch, bfloat16=[11.0, 3.0, 5.0]) == good | {"bfloat16": "differs"}
    assert gate_lines(monkeypatch, bfloat16=[11.01, 3.0, 4.0]) == good | {"bfloat16": "differs"}
    assert gate_lines(monkeypatch, float32=[11.0, 3.0, float("nan")]) == good | {"float32": "differs"}
    assert gate_lines(monkeypatch, bfloat16=BenchError("failed")) == good | {"bfloat16": "differs"}
    old = gate_lines(monkeypatch, replace(H200, dtype="float32"))
    assert old == {"float32": "pass", "bfloat16": "not run", "bfloat16 compiled": "not run"}
