"""Step functions after a rounding are no false alarm, integers are compared, random operations are not checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numerics import NumericsError, check_operation, check_optimizer
from numerics.oracle.check import Oracle
from numerics.oracle.operation import Operation, reference
from numerics.oracle.results import DEVICE, Check

LOW = (torch.bfloat16, torch.float16)
STEPS: dict[str, Callable[[Tensor], Any]] = {
    "fake quantisation": lambda x: torch.round(x / 0.05) * 0.05,
    "floor": lambda x: torch.floor(x * 10),
    "round": lambda x: torch.round(x * 3),
    "in place": lambda x: (x * 3).round_(),
    "trunc": lambda x: (x * 10).trunc(),
    "ceil": lambda x: (x + 0.1).ceil(),
    "sign": lambda x: torch.sign(x * 3 - 1),
    "cancellation": lambda x: (x + 100).round(),
    "mask": lambda x: x * ((x * 3) > 0.3),
    "mask of two": lambda x: x * ((x * 3) > x.flip(0) * 3),
    "ReLU": lambda x: F.relu(x * 3 - 1),
    "product of steps": lambda x: (torch.round(x / 0.05) * 0.05) @ x.T,
    "integers": lambda x: (x.exp(), x.exp() > 1.3, (x * 10).int(), x.exp().argmax(-1), x.topk(3, -1)[1]),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wrong(checks: list[Check], how: str = DEVICE) -> list[str]:
    return [check.text for check in checks if check.wrong and how in (check.how, "")]


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_a_rounding_before_a_step_is_no_false_alarm(dtype: torch.dtype) -> None:
    x = draw(64, 96).to(dtype)
    assert [text for function in STEPS.values() for text in wrong(check_operation(function, [x]), "")] == []


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_elements_with_a_jump_are_those_that_a_rounding_moves_across(dtype: torch.dtype) -> None:
    x = draw(64, 96).to(dtype)
    known = reference(Operation("round", "round", lambda x: torch.round(x * 3), [x]))
    jumps = known.jumps("forward", 0)
    assert jumps is not None
    u = torch.finfo(dtype).eps / 2
    exact = x.double().numpy() * 3
    half = u * 2.0 ** np.floor(np.log2(np.abs(exact)))
    expected = np.round(exact + half) != np.round(exact - half)
    assert 0 < expected.sum() < expected.size / 2
    assert np.mean((jumps > 0).numpy() != expected) < 0.002  # the band is a thousandth wider


def test_a_wrong_element_beside_the_jumps_is_found() -> None:
    x = draw(64, 96).bfloat16()
    x[3, 5] = 0.75  # 2.25, between two jumps

    def off_by_one(x: Tensor) -> Tensor:
        return torch.round(x * 3) + F.one_hot(torch.tensor(3 * 96 + 5), x.numel()).view_as(x)

    assert wrong(check_operation(off_by_one, [x], reference=lambda x: torch.round(x * 3)))
    for function, right in (
        (lambda x: torch.floor(x * 10), lambda x: torch.trunc(x * 10)),
        (lambda x: x * ((x * 3) > 0.4), lambda x: x * ((x * 3) > 0.3)),
    ):
        assert wrong(check_operation(function, [x], reference=right))


@pytest.mark.parametrize(
    "function",
    [
        F.gelu,
        lambda x: x.softmax(-1),
        lambda x: x @ x.T,
        lambda x: torch.maximum(x * 3, x.flip(0) * 3).abs().T.contiguous(),
        lambda x: F.relu(x * 3).amax(-1),
        lambda x: (x * 3).sort().values,
        lambda x: torch.where(x > 0, x * 3, x.exp()).clamp(-1, 0.3),
    ],
)
def test_a_function_without_steps_has_no_jumps(function: Callable[..., Any]) -> None:
    known = reference(Operation("f", "f", function, [draw(16, 96).bfloat16()]))
    assert known.jumps("forward", 0) is None


@pytest.mark.parametrize(
    ("function", "right", "count"),
    [
        (lambda x: (x.exp(), x >= 0), lambda x: (x.exp(), x < 0), "6,144 of 6,144"),
        (lambda x: (x.exp(), (-x).argmax(-1)), lambda x: (x.exp(), x.argmax(-1)), "64 of 64"),
        (lambda x: (x.exp(), x.exp() > 3), lambda x: (x.exp(), x.exp() > 2), "elements differ"),
    ],
)
def test_wrong_integers_beside_rounded_numbers_are_named(function: Any, right: Any, count: str) -> None:
    found = wrong(check_operation(function, [draw(64, 96)], reference=right))
    assert len(found) == 1
    assert "result 1" in found[0]
    assert count in found[0]


def test_integers_that_a_rounding_changes_are_counted_as_not_checked() -> None:
    oracle = Oracle(torch.device("cpu"), extremes=False)
    checks = oracle.check(Operation("f", "f", lambda x: (x.exp(), (x * 10).int()), [draw(64, 96).bfloat16()]))
    assert not any(check.wrong for check in checks)
    assert any(
        "result 1 has integers, which a rounding error may change" in skip.reason for skip in oracle.skipped
    )


@pytest.mark.parametrize(
    ("function", "right"),
    [
        (lambda x: F.dropout(x) * 1.3, F.dropout),
        (lambda x: x, F.dropout),
        (F.dropout, lambda x: x),
        (lambda x: x * 2 + torch.randn(96), lambda x: x + torch.randn(96)),
        (lambda x: x + torch.from_numpy(np.random.default_rng().normal(size=96)), lambda x: x),
        (nn.Dropout(0.5), None),
    ],
)
def test_a_random_operation_is_not_checked(function: Any, right: Any) -> None:
    with pytest.raises(NumericsError, match=r"cannot be checked: random: .*; fix: pass the random numbers"):
        check_operation(function, [draw(8, 96)], reference=right)


def test_a_module_with_dropout_switched_off_is_checked() -> None:
    module = nn.Sequential(nn.Linear(96, 8), nn.Dropout(0.5)).eval()
    assert wrong(check_operation(module, [draw(8, 96)]), "") == []


def test_the_bias_of_a_complex_layer_has_a_bound_of_a_sum() -> None:
    z = torch.complex(draw(20, 8), draw(20, 8, seed=1))
    layer = nn.Linear(8, 8, dtype=torch.complex64)
    checks = check_operation(
        lambda z, w, b: F.linear(z, w, b).abs(), [z.conj(), layer.weight.detach(), layer.bias.detach()]
    )
    assert wrong(checks, "") == []
    known = reference(Operation("sum", "sum", lambda z: z.sum(0), [z]))
    known.extend(4)
    assert float(known.sigma("forward", 0).min()) > 0


def test_a_factor_that_float32_holds_as_a_subnormal_number_is_within_rounding() -> None:
    assert wrong(check_operation(lambda x: x * 1e-42, [draw(8, 96)]), "") == []


def test_a_cast_that_the_reference_shares_is_named() -> None:
    checks = check_operation(lambda x: x.bfloat16().float() * 2, [draw(8, 96)])
    assert "the reference has the cast to bfloat16 too" in checks[0].derivation
    assert "cast" not in check_operation(lambda x: x * 2, [draw(8, 96)])[0].derivation


def test_what_cannot_be_checked_is_one_line() -> None:
    layer = nn.Linear(3, 3)
    layer(draw(4, 3)).sum().backward()
    sgd = torch.optim.SGD(layer.parameters(), 0.1)
    nested = torch.nested.nested_tensor([draw(4, 3), draw(2, 3)], layout=torch.jagged)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: check_operation(lambda x: x * 2, [nested]), "nested tensors"),
        (lambda: check_operation(lambda x: x * 2, [draw(3)], device="tpu"), "device tpu cannot be used"),
        (lambda: check_optimizer(sgd, "tpu"), "device tpu cannot be used"),
        (lambda: check_optimizer(3), "3 is not a torch.optim.Optimizer"),  # type: ignore[arg-type]
        (lambda: check_optimizer(torch.optim.LBFGS(layer.parameters())), "closure"),
    ]
    for call, text in calls:
        with pytest.raises(NumericsError, match=text) as raised:
            call()
        assert "fix: " in str(raised.value)
        assert "\n" not in str(raised.value)
