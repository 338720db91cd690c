"""Checks of kernels and gates on a GPU, whose workers are replaced by given results."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.card import gates, kernels
from bench.card.checks import CardCheck, CheckedDevice
from bench.card.kernels import KernelResult
from bench.workers import BenchError
from gpt2.hardware.gpu_specs import TARGETS
from gpt2.hardware.resolve import ResolvedTarget

H200 = ResolvedTarget(
    TARGETS["h200"], "cuda:0", "NVIDIA H200", 150_000_000_000, "bfloat16", "cudnn", None, "2.13.0", None
)
GOOD = KernelResult(2.0, (1e-3, 2e-3), (True, True))


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


def kernel_lines(
    monkeypatch: pytest.MonkeyPatch, found: list[str], card: ResolvedTarget = H200, **results: Any
) -> dict[str, CardCheck]:
    workers = Workers(
        selected_kernels=lambda resolved: (["cudnn", "flash", "efficient"], found),
        measure_kernel=lambda resolved, kernel, shape: results.get(kernel, GOOD),
    )
    monkeypatch.setattr(kernels, "BenchWorker", workers)
    return {check.name: check for check in kernels.kernel_checks(CheckedDevice(card, Path("none")))}


def test_equal_kernels_on_a_gpu_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = kernel_lines(monkeypatch, ["cudnn", "cudnn"])
    assert len(lines) == 11
    assert {line.verdict for line in lines.values()} == {"pass"}


def test_another_kernel_at_the_first_call_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    line = kernel_lines(monkeypatch, ["cudnn", "flash"])["kernels: order"]
    assert (line.verdict, line.measured) == ("differs", "cudnn, flash")


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (replace(GOOD, repeats=(True, False)), "pass"),  # gradients may be added in any order
        (replace(GOOD, repeats=(False, True)), "differs"),
        (replace(GOOD, errors=(1e-3, 0.06)), "differs"),
        (replace(GOOD, errors=(float("nan"), 1e-3)), "differs"),
        (BenchError("CUDA error: no kernel image"), "differs"),
    ],
)
def test_the_verdict_on_a_kernel(monkeypatch: pytest.MonkeyPatch, result: Any, verdict: str) -> None:
    lines = kernel_lines(monkeypatch, ["cudnn", "cudnn"], efficient=result)
    assert lines["kernels: efficient, 64 x 12 x 1024 x 64"].verdict == verdict
    assert lines["kernels: flash, 37 x 12 x 200 x 64"].verdict == "pass"


def test_a_preferred_kernel_that_is_slower_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = kernel_lines(monkeypatch, ["cudnn", "cudnn"], flash=replace(GOOD, milliseconds=1.0))
    assert lines["kernels: speed"].verdict == "differs"


def test_a_card_without_bfloat16_has_the_efficient_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = kernel_lines(monkeypatch, ["efficient", "efficient"], replace(H200, dtype="float32"))
    assert lines["kernels: order"].verdict == "pass"
    assert lines["kernels: flash, 64 x 12 x 1024 x 64"].verdict == "not run"


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
