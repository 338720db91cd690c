"""The faster loss of a card, run on a CPU: equal to the definition, compiled once, and used only where it is right."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from gpt2 import cpu_linear, loss, training_step
from gpt2.loss import gathered_chunk, linear_cross_entropy, softmax_gradient
from gpt2.training_step import compiled_loss, compiled_row_losses, disagreement
from tests.compilers import NO_COMPILER

VOCABULARY, PADDED, WIDTH, CHUNK = 37, 48, 16, 8


@pytest.fixture(autouse=True)
def everywhere_else(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU has no product of other dtype: here its factors are converted first."""
    product = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda a, b, *, out_dtype=None, **out: product(a.to(out_dtype), b.to(out_dtype), **out)
        if out_dtype else product(a, b, **out)
    )  # fmt: skip
    monkeypatch.setattr(loss, "CARD_ROWS", CHUNK)
    compiled_loss.cache_clear()
    with cpu_linear.standard_kernels():
        yield
    torch.compiler.reset()


def outcome(function: Any, rows: int, dtype: torch.dtype, scored: bool = True) -> list[Tensor]:
    """Return the loss and the gradients of x and the weight, in float64."""
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (rows,), generator=draw)
    if rows > 1 or not scored:
        targets[:: 3 if scored else 1] = -1
    value = function(x, weight, targets)
    return [each.detach().double() for each in (value, *torch.autograd.grad(value, (x, weight)))]


def definition(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight[:VOCABULARY].T, targets, ignore_index=-1)


def fast(x: Tensor, weight: Tensor, targets: Tensor, softmax: Any = softmax_gradient) -> Tensor:
    chunk = functools.partial(gathered_chunk, softmax)
    return linear_cross_entropy(x, weight, targets, VOCABULARY, chunk=chunk, rows=CHUNK, even=True)


@pytest.mark.parametrize("rows", [1, 7, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_the_faster_loss_and_its_gradients_are_those_of_the_definition(rows: int) -> None:
    """Also where the last chunk is padded, and where it has no scored row."""
    for ours, exact in zip(
        outcome(fast, rows, torch.float64), outcome(definition, rows, torch.float64), strict=True
    ):
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-12)
    exact = outcome(definition, rows, torch.float64)
    for ours, right in zip(outcome(fast, rows, torch.bfloat16), exact, strict=True):
        assert (ours - right).norm() <= 0.03 * right.norm() + 1e-6
    assert not any(each.any() for each in outcome(fast, rows, torch.float64, scored=False))


def test_a_product_of_bfloat16_reaches_the_float32_sum_without_rounding() -> None:
    draw = torch.Generator().manual_seed(0)
    grad, x = (torch.randn(64, width, generator=draw).bfloat16() for width in (PADDED, WIDTH))
    exact = 2 * grad.double().T @ x.double()
    total = torch.zeros(PADDED, WIDTH)
    for first in (True, False):
        loss._add_product(total, grad, x, first, direct=True)
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)


def test_chunks_of_any_number_of_rows_are_compiled_once_for_a_number() -> None:
    """A second shape would be compiled with dynamic shapes, to slower kernels for all chunks."""
    counter = CompileCounter()
    compiled = torch.compile(softmax_gradient, backend=counter)
    for _ in range(2):
        outcome(functools.partial(fast, softmax=compiled), 3 * CHUNK + 5, torch.bfloat16)
    assert counter.frame_count == 1


@NO_COMPILER
@pytest.mark.slow
def test_the_compiled_loss_is_that_of_eager_code() -> None:
    compiled = functools.partial(fast, softmax=torch.compile(softmax_gradient, fullgraph=True))
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 4e-3)):
        pairs = zip(outcome(compiled, 29, dtype), outcome(fast, 29, dtype), strict=True)
        assert all((ours - eager).norm() <= limit * eager.norm() for ours, eager in pairs)


# ---- the gate


def wrong_gradient(*given: Any) -> Tensor:
    log_sum_N1 = softmax_gradient(*given)
    given[0][:, 3] += 0.1 / len(given[0])
    return log_sum_N1


def wrong_targets(*given: Any) -> Tensor:
    return softmax_gradient(*given) + 0.01


def unsupported(*given: Any) -> Tensor:
    raise NotImplementedError("no such kernel")


SIZES = (torch.bfloat16, CHUNK, WIDTH, PADDED, VOCABULARY)


@pytest.mark.parametrize(
    ("softmax", "reason"),
    [
        (softmax_gradient, ""),
        (wrong_gradient, "its gradients by"),
        (wrong_targets, "differs by 1.0e-02 nats"),
        (unsupported, "no such kernel"),
    ],
)
def test_a_card_on_which_the_faster_loss_is_wrong_takes_the_standard_one(
    softmax: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(loss, "softmax_gradient", softmax)
    chosen, note = compiled_loss("cpu", *SIZES)
    assert reason in note
    assert bool(note) == bool(reason)
    ours, exact = (outcome(each, 29, torch.bfloat16) for each in (
        lambda *given: chosen(*given, VOCABULARY), lambda *given: linear_cross_entropy(*given, VOCABULARY)
    ))  # fmt: skip
    for mine, right in zip(ours, exact, strict=True):
        assert (mine - right).norm() <= 0.01 * right.norm()


def test_a_card_without_memory_for_the_comparison_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan then tries a smaller micro-batch; the standard loss would hide that the plan was wrong."""

    def full(*given: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        disagreement(full, "cpu", *SIZES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_losses_of_rows_are_those_of_the_definition(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(11, PADDED, generator=draw, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCABULARY, (11,), generator=draw)
    targets[4] = -1
    exact = F.cross_entropy(logits.double()[:, :VOCABULARY], targets, ignore_index=-1, reduction="none")
    rounding = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-12, "atol": 1e-12}
    found = loss.target_losses(logits, targets, VOCABULARY)
    torch.testing.assert_close(found.double(), exact, **rounding)
    torch.testing.assert_close(loss.target_losses_sliced(logits, targets, VOCABULARY), found, **rounding)


@pytest.mark.parametrize(("wrong", "reason"), [(0.0, ""), (0.01, "one differs by 1.0e-02")])
def test_compiled_losses_of_an_evaluation_are_used_only_where_they_are_right(
    wrong: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They decide the verdicts of a study."""
    right = loss.target_losses
    monkeypatch.setattr(training_step, "target_losses", lambda *given: right(*given) + wrong)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    compiled_row_losses.cache_clear()
    chosen, note = compiled_row_losses("cpu", torch.bfloat16, PADDED, VOCABULARY)
    assert reason in note
    assert (chosen is loss.target_losses_sliced) == bool(reason)
