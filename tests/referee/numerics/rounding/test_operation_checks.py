"""The check of one operation: no false alarm on correct kernels, wrong ones are found, what cannot be checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from referee.numerics import NumericsError, check_operation
from referee.numerics.rounding.operation_checks import Check
from tests.referee.numerics.rounding.correct_kernels import calls
from tests.referee.numerics.rounding.wrong_kernels import INVISIBLE, WRONG_KERNELS, draw


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def wrong(checks: list[Check]) -> list[str]:
    return [check.text for check in checks if check.wrong]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_correct_kernels_are_within_rounding_on_extreme_inputs_too(dtype: torch.dtype) -> None:
    found = {
        name: wrong(check_operation(function, args, options))
        for name, function, args, options in calls(dtype, rows=3, width=17)
    }
    # A zero vector divided by its norm + 1e-12, which float16 rounds to 0: the check is right that this is NaN.
    underflow = (
        {"normalize", "normalize of an offset", "cosine_similarity"} if dtype == torch.float16 else set()
    )
    assert {name for name, texts in found.items() if texts} == underflow


def lost_nan(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))  # ReLU of some devices


def overflowing_norm(x: Tensor) -> Tensor:
    return (x * x).sum(-1).sqrt()


EXTREME: dict[str, tuple[Callable[..., Any], list[Tensor], Callable[..., Any], str]] = {
    **{name: (*WRONG_KERNELS[name], how) for name, how in zip(INVISIBLE, ("large", "large"), strict=True)},
    "NaN is lost": (lost_nan, [draw(16, 96)], F.relu, "NaN"),
    "overflow within": (
        overflowing_norm,
        [40 * draw(4, 500).half()],
        lambda x: torch.linalg.vector_norm(x, dim=-1),
        "device",
    ),
}


@pytest.mark.parametrize("name", EXTREME)
def test_what_extreme_inputs_alone_show(name: str) -> None:
    function, inputs, right, how = EXTREME[name]
    found = check_operation(function, inputs, reference=right)
    assert how in {check.how for check in found if check.wrong}
    assert wrong(check_operation(right, inputs)) == []


@pytest.mark.parametrize("flushed", ["results", "inputs"])
def test_flushing_subnormals_is_no_error(flushed: str) -> None:
    tiny = torch.finfo(torch.float32).tiny

    def flush(x: Tensor) -> Tensor:
        return torch.where(x.abs() < tiny, 0.0, x)

    def device(x: Tensor) -> Tensor:
        return flush(x * 3) if flushed == "results" else flush(x) * 3

    assert wrong(check_operation(device, [draw(30)], reference=lambda x: x * 3)) == []
    halved = check_operation(
        lambda x: device(x) * (1 + (x.abs() < tiny)), [draw(30)], reference=lambda x: x * 3
    )
    assert {check.how for check in halved if check.wrong} == (
        {"subnormal"} if flushed == "results" else set()
    )


# -- gradients


def test_a_missing_gradient_is_found() -> None:
    x, y = draw(3, 4), draw(3, 4, seed=1)
    checks = check_operation(lambda a, b: a * b.detach(), [x, y], reference=lambda a, b: a * b)
    assert [(check.part, check.why) for check in checks if check.wrong] == [("gradient 1", "no gradient")]
    assert wrong(check_operation(lambda x: x.detach().round(), [x], reference=torch.round)) == []


# -- what cannot be checked


def test_what_cannot_be_checked_is_one_line() -> None:
    layer, x = nn.Linear(3, 3), draw(4, 3)
    nested = torch.nested.nested_tensor([draw(4, 3), draw(2, 3)], layout=torch.jagged)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: check_operation(lambda x: x * 2, [nested]), "nested tensors"),
        (lambda: check_operation(lambda x: x * 2, [x], device="tpu"), "device tpu cannot be used"),
        (lambda: check_operation(lambda x: x, [torch.arange(3)]), "no floating tensor"),
        (lambda: check_operation(lambda x: x * (1 // 0), [x]), "it raised ZeroDivisionError"),
        (lambda: check_operation(torch.exp, [x], reference=lambda x: x / (1 // 0)), "the reference raised"),
        (lambda: check_operation(lambda x: None, [x]), "it returns no tensor"),
        (lambda: check_operation(F.dropout, [x]), "random"),
        (lambda: check_operation(F.dropout, [x], reference=lambda x: x), "random"),
        (lambda: check_operation(layer, [x]), "a module"),
        (lambda: check_operation(torch.exp, [x], reference=layer), "a module"),
    ]
    for call, text in calls:
        with pytest.raises(NumericsError, match=text) as raised:
            call()
        assert "fix: " in str(raised.value)
        assert "\n" not in str(raised.value)


def test_the_example_of_the_page_prints_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[4] / "docs/oracle.md").read_text(encoding="utf-8")
    exec(compile(page.partition("```python\n")[2].partition("```")[0], "checked.py", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    block = page.partition("It prints, on one thread")[2].partition("The bias's")[0]
    shown = [line.strip().partition(":")[0] for line in block.splitlines() if line.startswith("    ")]
    assert [line.partition(":")[0] for line in printed][: len(shown)] == shown
    assert len(printed) == len(shown) + 5
