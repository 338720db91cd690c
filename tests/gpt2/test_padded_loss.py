"""The loss except on a CPU in float32: aligned matrix products, no effect of padding, equal results.

The tests run it on a CPU with the CPU kernels disabled, as a prediction for a GPU does.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2 import cpu_linear
from gpt2 import loss as loss_module
from gpt2.allocation_tracker import AllocationTracker
from gpt2.loss import chunk_loss, chunk_loss_sliced, linear_cross_entropy, token_losses
from gpt2.measured_memory import AllocatorListener
from tests.compilers import NO_COMPILER

pytestmark = pytest.mark.slow
VOCABULARY, PADDED, WIDTH, CHUNK = 37, 48, 16, 8
ALIGNED = 8  # bfloat16 numbers in 16 bytes
COMPILED = [("aot_eager", torch.float64), ("aot_eager", torch.bfloat16)]  # float64 has the tightest bound
ATEN = torch.ops.aten
PRODUCTS = (ATEN.mm, ATEN.addmm, ATEN.addmm_, ATEN.bmm)


@pytest.fixture(autouse=True)
def everywhere_else(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", {"cpu": CHUNK})
    monkeypatch.setattr(loss_module, "FLOAT32_ROWS", dict.fromkeys((2, 4, 8), 3))
    with cpu_linear.standard_kernels():
        yield
    torch.compiler.reset()


def sample(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, WIDTH, generator=generator, dtype=torch.float64) / 4
    targets = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    if rows > 1:
        targets[1::4] = -1
    return x.to(dtype), weight.to(dtype), targets


def plain(x: Tensor, weight: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    return F.cross_entropy(x @ weight[:vocabulary].T, targets, ignore_index=-1)


def outcome(function: Any, x: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> list[Tensor]:
    """Return the loss and the gradients of a third of it."""
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    value = function(*leaves, targets, VOCABULARY, **options)
    (value / 3).backward()
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(gradients) == 2
    return [value.detach(), *gradients]


class Products(TorchDispatchMode):
    """The leading dimension of every matrix of every product, and of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.leading: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            for matrix in (*args, out):
                if isinstance(matrix, Tensor):
                    assert 1 in matrix.stride()
                    self.leading.append(max(matrix.stride()))
        return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [CHUNK, 2 * CHUNK + 3])
def test_every_row_of_a_matrix_in_a_head_product_is_aligned(dtype: str, rows: int) -> None:
    x, weight, targets = sample(rows)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
        Products() as products,
    ):
        outcome(linear_cross_entropy, x, weight, targets)
        token_losses(x, weight, targets, VOCABULARY)
    chunks = -(-rows // CHUNK)
    assert len(products.leading) >= 3 * 3 * chunks
    assert not [leading for leading in products.leading if leading % ALIGNED]


def test_padding_rows_have_no_effect_and_receive_no_gradient() -> None:
    """Padded rows of the weight are large enough to dominate the softmax. Two chunks and a remainder."""
    for dtype in (torch.float64, torch.bfloat16):
        x, weight, targets = sample(2 * CHUNK + 3, dtype)
        weight[VOCABULARY:] = 1e4
        value, _, grad_weight = outcome(linear_cross_entropy, x, weight, targets)
        loose = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-10, "atol": 1e-12}
        exact = plain(x.double(), weight.double(), targets, VOCABULARY)
        torch.testing.assert_close(value.double(), exact, **loose)
        assert torch.equal(grad_weight[VOCABULARY:], torch.zeros_like(grad_weight[VOCABULARY:]))
        scored = token_losses(x, weight, targets, VOCABULARY)
        torch.testing.assert_close(scored.sum().double() / (targets >= 0).sum(), exact, **loose)
        assert torch.equal(scored[targets < 0], torch.zeros_like(scored[targets < 0]))


def test_under_autocast_loss_and_gradients_agree_with_float32_to_bfloat16_precision() -> None:
    x, weight, targets = sample(61)
    exact = outcome(plain, x.double(), weight.double(), targets)
    with torch.autocast("cpu", torch.bfloat16):
        ours = outcome(linear_cross_entropy, x, weight, targets)
        scored = token_losses(x, weight, targets, VOCABULARY)
    for mine, right in zip(ours, exact, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - right).norm() <= 2**-7 * right.norm()
    logits = (x.bfloat16() @ weight[:VOCABULARY].bfloat16().T).float()
    rounded = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    torch.testing.assert_close(scored, rounded, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[0], rounded.sum() / (targets >= 0).sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("backend", "dtype"), COMPILED)
def test_a_compiled_chunk_equals_the_eager_one_and_the_plain_formula(
    backend: str, dtype: torch.dtype
) -> None:
    compiled = torch.compile(chunk_loss, backend=backend, fullgraph=True)
    drawn = sample(2 * CHUNK + 3, dtype)  # the rest is of another length
    eager = outcome(linear_cross_entropy, *drawn)
    ours = outcome(linear_cross_entropy, *drawn, chunk=compiled)
    exact = outcome(plain, *(t.double() if t.is_floating_point() else t for t in drawn))
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    for mine, same, right in zip(ours, eager, exact, strict=True):
        assert mine.dtype == same.dtype
        for other in (same, right):
            assert (mine.double() - other.double()).norm() <= close * other.double().norm()
    assert torch.equal(ours[2][VOCABULARY:], torch.zeros_like(ours[2][VOCABULARY:]))


def logits_of(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, columns, generator=generator).to(dtype)
    vocabulary = columns - 11
    return logits, torch.randint(0, vocabulary, (rows,), generator=generator), torch.tensor(9.0), vocabulary


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@NO_COMPILER
def test_a_compiled_chunk_writes_its_gradient_into_the_logits(
    dtype: torch.dtype,
) -> None:
    rows, columns = 64, 4096
    compiled = torch.compile(chunk_loss, fullgraph=True)
    compiled(*logits_of(rows, columns, dtype))
    arguments, before = logits_of(rows, columns, dtype), logits_of(rows, columns, dtype)
    with AllocatorListener(0) as listener, listener.phase("chunk"):
        compiled(*arguments)
    assert listener.by_phase.get("chunk", 0) <= 16 * rows * 8  # some numbers a row
    chunk_loss(*before)
    torch.testing.assert_close(arguments[0], before[0], rtol=2**-7, atol=1e-6)


def test_an_eager_bfloat16_chunk_converts_few_rows_to_float32_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_module, "FLOAT32_ROWS", {2: 4})
    rows, columns = 64, 4096
    arguments = logits_of(rows, columns, torch.bfloat16)
    tracker = AllocationTracker()
    with tracker:
        tracker.mark("other", [arguments[0]])
        with tracker.phase("chunk"):
            chunk_loss_sliced(*arguments)
    extra = tracker.timeline().peak_bytes() - rows * columns * 2
    assert 0 < extra <= 4 * columns * (4 + 4 + 1) + 3 * 8 * columns
