"""The check of one operation: no false alarm on correct kernels, and wrong ones are found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from numerics import NumericsError, check_operation
from numerics.oracle.operation import Operation, reference
from numerics.oracle.results import Check
from numerics.oracle.rounding_model.measure import measure, ulp
from tests.numerics.rounding.correct_kernels import calls

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A zero vector divided by its norm + 1e-12, which float16 rounds to 0: the check is right that this is NaN.
UNDERFLOW = ("normalize", "normalize of an offset", "cosine_similarity")


def wrong(checks: list[Check]) -> list[str]:
    return [check.text for check in checks if check.wrong]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_correct_kernels_are_within_rounding(dtype: torch.dtype) -> None:
    found = {
        name: wrong(check_operation(function, args, options))
        for name, function, args, options in calls(dtype, rows=5, width=33)
        if not (dtype == torch.float16 and name in UNDERFLOW)
    }
    assert {name: texts for name, texts in found.items() if texts} == {}
    assert len(found) > 80


def test_a_norm_that_underflows_in_float16_is_found() -> None:
    found = [
        check for check in check_operation(F.normalize, [draw(3, 8, dtype=torch.float16)]) if check.wrong
    ]
    assert [check.how for check in found] == ["zeros"]
    assert "NaN where float64 has 0" in found[0].measured.why


# -- wrong kernels


def half_statistics(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    narrow = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
    mean = x.float().mean(-1, keepdim=True).to(narrow).float()
    scale = ((x.float() - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt().to(narrow).float()
    return ((x.float() - mean) * scale * weight.float() + bias.float()).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def without_maximum(x: Tensor) -> Tensor:
    terms = x.float().exp()
    return (terms / terms.sum(-1, keepdim=True)).to(x.dtype)


def narrow_product(x: Tensor, w: Tensor) -> Tensor:
    return (x.bfloat16() @ w.bfloat16()).to(x.dtype)


def narrow_sum(x: Tensor, w: Tensor) -> Tensor:
    """Add the products one after the other in the dtype of the tensors."""
    total = torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype)
    for place in range(x.shape[1]):
        total = total + x[:, place, None] * w[None, place]
    return total


def one_element(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return y + torch.zeros_like(y).index_put_((torch.tensor(3), torch.tensor(2)), y.detach().std() / 50)


class ReluGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return received[0] * (x > 0)


def other_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def lost_nan(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))  # ReLU of some devices


GAIN, SHIFT = 1 + draw(96, seed=1) / 10, draw(96, seed=2) / 10
WRONG: dict[str, tuple[Callable[..., Any], list[Tensor], Callable[..., Any], str]] = {
    "other GELU": (other_gelu, [draw(16, 96)], F.gelu, "device"),
    "the other way round": (F.gelu, [draw(16, 96)], other_gelu, "device"),
    "half-precision statistics": (half_statistics, [draw(16, 96), GAIN, SHIFT], layer_norm, "device"),
    "softmax without maximum": (without_maximum, [draw(16, 96)], lambda x: F.softmax(x, -1), "large"),
    "product in bfloat16": (narrow_product, [draw(16, 96), draw(96, 24)], torch.matmul, "device"),
    "one wrong element": (one_element, [draw(16, 96), draw(96, 24)], torch.matmul, "device"),
    "gradient of another function": (ReluGradient.apply, [draw(16, 96)], F.gelu, "device"),  # type: ignore[dict-item]
    "NaN is lost": (lost_nan, [draw(16, 96)], F.relu, "NaN"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_found(name: str) -> None:
    function, inputs, right, how = WRONG[name]
    found = [check for check in check_operation(function, inputs, reference=right) if check.wrong]
    assert how in {check.how for check in found}
    assert wrong(check_operation(right, inputs)) == []


def test_the_wrong_gradient_is_the_only_finding() -> None:
    found = [
        check
        for check in check_operation(ReluGradient.apply, [draw(16, 96)], reference=F.gelu)
        if check.wrong
    ]
    assert {check.direction for check in found} == {"backward"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_in_the_dtype_of_the_tensors_are_found_by_one_unit(dtype: torch.dtype) -> None:
    inputs = [draw(64, 256, dtype=dtype), draw(256, dtype=dtype, seed=1), draw(256, dtype=dtype, seed=2)]
    checks = check_operation(half_statistics, inputs, reference=layer_norm)
    device = next(check for check in checks if check.how == "device" and check.direction == "forward")
    assert device.wrong
    assert device.measured.distance < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_that_adds_in_the_dtype_of_the_tensors_is_found(dtype: torch.dtype) -> None:
    inputs = [draw(8, 256, dtype=dtype), draw(256, 8, dtype=dtype, seed=1)]
    assert any(
        "device" == check.how
        for check in check_operation(narrow_sum, inputs, reference=torch.matmul)
        if check.wrong
    )


def test_another_shape_of_the_result_is_found() -> None:
    found = wrong(check_operation(lambda x: x[:2] * 2, [draw(4, 3)], reference=lambda x: x * 2))
    assert found
    assert "shape [2, 3] against [4, 3]" in found[0]


def test_a_function_that_cannot_run_is_one_line() -> None:
    with pytest.raises(NumericsError, match=r"cannot be checked: .*fix:"):
        check_operation(lambda x: x, [torch.arange(3)])


# -- the parts, against other implementations


@pytest.mark.parametrize(("dtype", "other"), [(torch.float32, np.float32), (torch.float16, np.float16)])
def test_the_unit_in_the_last_place_is_numpys_spacing(dtype: torch.dtype, other: Any) -> None:
    exponents = torch.arange(-30.0, 15.0, 0.37, dtype=torch.float64)
    values = torch.cat([torch.zeros(1, dtype=torch.float64), 2**exponents]).to(dtype)
    expected = np.abs(np.spacing(values.numpy().astype(other))).astype(np.float64)
    assert torch.equal(ulp(values.double(), dtype), torch.from_numpy(expected))
    assert torch.equal(ulp(-values.double(), dtype), ulp(values.double(), dtype))


def test_the_unit_of_float64_is_that_of_math() -> None:
    values = [1.0, 1.5, 2.0, 1e-300, 3e300, 0.1]
    assert ulp(torch.tensor(values, dtype=torch.float64), torch.float64).tolist() == list(
        map(math.ulp, values)
    )


def test_the_nearest_number_is_half_a_unit_away_at_most() -> None:
    exact = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 5
    for dtype in DTYPES:
        nearest = exact.to(dtype)
        assert measure(nearest, exact, torch.zeros_like(exact), dtype).ratio <= 1
        beyond = (nearest.double() + 0.6 * ulp(exact, dtype) * exact.sign()).to(dtype)
        assert measure(beyond, exact, torch.zeros_like(exact), dtype).wrong


@pytest.mark.parametrize(
    ("count", "order"), [(30, ""), (1000, ""), (20_000, ""), (30, "sorted"), (1000, "sorted")]
)
def test_adding_term_after_term_is_within_the_bound(count: int, order: str) -> None:
    """Recursive summation is the least accurate way of a correct kernel; sorted numbers are its worst order."""
    x = draw(16, count, seed=count)
    x = x.sort(-1).values if order == "sorted" else x
    total = torch.zeros(16)
    for column in x.unbind(-1):
        total = total + column
    known = reference(Operation("sum", "sum", torch.sum, [x, -1]))
    known.extend(4)
    found = measure(total, known.exact.results[0], known.sigma("forward", 0), torch.float32)
    assert 0.001 < found.ratio < 1


def test_the_derivation_names_the_rows_and_the_length_of_the_sums() -> None:
    checks = check_operation(F.linear, [draw(6, 96), draw(5, 96), draw(5)])
    assert "addmm: matrix product and sum, n = 96" in checks[0].derivation


def test_float64_and_zeros_are_measured() -> None:
    for x in (draw(4, 5).double(), torch.zeros(4, 5, dtype=torch.float64), torch.zeros(4, 5)):
        checks = check_operation(lambda x: x * 3, [x])
        assert wrong(checks) == []
        assert {check.verdict for check in checks} <= {"exact", "note"}


def test_complex_numbers_and_the_largest_number_are_within_rounding() -> None:
    z = torch.complex(draw(6, 8), draw(6, 8, seed=1))
    for function, inputs in ((torch.abs, [z]), (torch.mm, [z, z.T]), (torch.nan_to_num, [draw(4, 5) / 0])):
        assert wrong(check_operation(function, inputs)) == []


def test_the_same_inputs_have_the_same_digest_and_results() -> None:
    first, second = (check_operation(F.gelu, [draw(4, 8)]) for _ in range(2))
    assert [check.measured for check in first] == [check.measured for check in second]
    assert first[0].digest == second[0].digest != check_operation(F.gelu, [draw(4, 8, seed=1)])[0].digest
