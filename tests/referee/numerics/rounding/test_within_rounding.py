"""Correct kernels are within rounding, wrong ones are not, random ones are not judged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from referee.numerics.rounding.within_rounding import RANDOM, Error
from tests.referee.numerics.rounding.correct_kernels import calls, errors_of, received
from tests.referee.numerics.rounding.wrong_kernels import INVISIBLE, LOW, WRONG_KERNELS, draw


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def wrong(errors: list[Error]) -> list[Error]:
    return [error for error in errors if not error.within]


# All sizes and seeds: python -m tests.referee.numerics.rounding.correct_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_correct_kernels_are_within_rounding(dtype: torch.dtype) -> None:
    found = {
        name: wrong(errors_of(function, args, options, received=received(function, args, options)))
        for name, function, args, options in calls(dtype, rows=5, width=33)
    }
    assert {name: errors for name, errors in found.items() if errors} == {}
    assert len(found) == 97


@pytest.mark.parametrize("name", WRONG_KERNELS)
def test_wrong_kernels_are_not(name: str) -> None:
    function, inputs, right = WRONG_KERNELS[name]
    gradients = received(right, inputs)
    errors = errors_of(function, inputs, received=gradients, reference=right)
    assert bool(wrong(errors)) == (name not in INVISIBLE)
    if inputs[0].dtype == LOW:  # visible in the float32 run alone
        assert {error.dtype for error in wrong(errors)} == {torch.float32}


def scores(scale: float) -> Tensor:
    return draw(32, 64) * scale


HARD: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "softmax of large scores": (F.softmax, [scores(20), -1]),
    "attention of large scores": (
        F.scaled_dot_product_attention,
        [8 * draw(1, 2, 64, 16), draw(1, 2, 64, 16, seed=1), draw(1, 2, 64, 16, seed=2)],
    ),
    "linear, 4096 terms": (F.linear, [draw(8, 4096), draw(8, 4096, seed=1)]),
    "convolution, gradient of 16,384 terms": (F.conv2d, [draw(4, 3, 66, 66), draw(4, 3, 3, 3, seed=1)]),
    "8,192 repeats": (F.embedding, [torch.zeros(8192, dtype=torch.int64), draw(3, 8)]),
    "batch norm, channels last": (
        lambda x: F.batch_norm(x, None, None, training=True),
        [draw(4, 8, 16, 16).to(memory_format=torch.channels_last)],
    ),
    "large vocabulary": (F.cross_entropy, [draw(4, 50304), torch.arange(4)]),
    "solve": (torch.linalg.solve, [draw(32, 32), draw(32, 4, seed=1)]),
    "inverse": (torch.linalg.inv, [draw(32, 32)]),
    "determinants": (torch.linalg.det, [draw(3, 10, 10)]),
    "cholesky": (lambda A: torch.linalg.cholesky(A @ A.mT + torch.eye(10, dtype=A.dtype)), [draw(3, 10, 10)]),
    "matrix exponential": (torch.linalg.matrix_exp, [draw(3, 10, 10)]),
    "small eigenvalue": (torch.linalg.eigvalsh, [torch.diag(torch.tensor([1e4, 1e-4]))]),
    "complex": (torch.mm, [torch.complex(draw(6, 8), draw(6, 8, seed=1)), draw(8, 6).to(torch.complex64)]),
    "default eps": (lambda x: F.rms_norm(x, (64,)), [1e-4 * draw(8, 64)]),
    "overflow in float16": (torch.exp, [draw(64).half() * 10]),
    "underflow in float16": (torch.exp, [draw(64).half().abs() * -10]),
    "infinities": (F.softmax, [draw(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf), -1]),
    "saturated softmax": (F.softmax, [torch.tensor([[0.0, 14.0, 0.5], [1.0, 1.1, 15.0]]), -1]),
    "saturated sigmoid": (torch.sigmoid, [torch.tensor([14.0, 16.0, 15.0])]),
    "saturated tanh": (torch.tanh, [torch.tensor([7.0, 8.0, 7.5])]),
    "positions by a plain number": (F.interpolate, [draw(2, 4, 12, 12), None, 1.7, "bicubic"]),
    "no elements": (torch.exp, [draw(0, 3)]),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_calls_are_within_rounding(name: str) -> None:
    function, inputs = HARD[name]
    errors = errors_of(function, inputs, received=received(function, inputs))
    assert wrong(errors) == []
    assert errors


@pytest.mark.parametrize(
    "function",
    [
        F.dropout,
        torch.bernoulli,
        torch.randn_like,
        lambda x: torch.normal(x, 1.0),
        F.gumbel_softmax,
        lambda x: torch.rand_like(x) > x,
        lambda x: x.clone().uniform_(),
    ],
)
def test_random_calls_are_not_judged(function: Callable[..., Any]) -> None:
    x = torch.full((4, 4), 0.5)
    (error,) = errors_of(function, [x], results=[x + 100], received=[x])
    assert (error.why, error.within) == (RANDOM, True)
    for mine, right in ((function, torch.exp), (torch.exp, function)):
        assert [one.why for one in errors_of(mine, [x], reference=right)] == [RANDOM]


def test_integers_are_compared_where_the_draws_agree() -> None:
    x = torch.tensor([[3.0, 1.0, 0.0], [2.0, 2.0, 0.0]])
    assert errors_of(torch.argmax, [x, 1], results=[torch.tensor([0, 1])])[0].within  # a tie
    assert not errors_of(torch.argmax, [x, 1], results=[torch.tensor([2, 0])])[0].within


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.round(x / 0.05) * 0.05,
        lambda x: torch.floor(x * 10),
        lambda x: (x + 100).round(),
        lambda x: x * ((x * 3) > 0.3),
        lambda x: (x.exp(), x.exp() > 1.3, (x * 10).int(), x.exp().argmax(-1), x.topk(3, -1)[1]),
    ],
)
def test_a_rounding_before_a_jump_is_no_false_alarm(function: Callable[..., Any], dtype: torch.dtype) -> None:
    assert wrong(errors_of(function, [draw(64, 96).to(dtype)])) == []


def test_arguments_may_be_overwritten_and_are_not_changed() -> None:
    x = draw(3, 3)
    before = x.clone()
    assert wrong(errors_of(lambda x: x.mul_(2), [x], received=[x])) == []
    assert torch.equal(x, before)
