import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2 import cpu_linear
from gpt2 import loss as loss_module
from gpt2.loss import linear_cross_entropy, token_losses

VOCABULARY, PADDED, WIDTH = 37, 48, 12


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", {"cpu": 5})


def sample(rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=dtype)
    weight = torch.randn(PADDED, WIDTH, generator=generator, dtype=dtype)
    targets = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    return x, weight, targets


def plain(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ weight[:VOCABULARY].T, targets, ignore_index=-1)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 23),
    ignored=st.booleans(),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1.0, 0.25]),
)
def test_loss_and_gradients_equal_the_plain_formula(
    rows: int, ignored: bool, seed: int, scale: float
) -> None:
    x, weight, targets = sample(rows, torch.float64, seed)
    if ignored and rows > 1:
        targets[::2] = -1
    results = []
    for function in (
        lambda a, b: linear_cross_entropy(a, b, targets, VOCABULARY),
        lambda a, b: plain(a, b, targets),
    ):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        value = function(a, b)
        (value * scale).backward()
        results.append((value, a.grad, b.grad))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "width", [cpu_linear.MIN_HEAD_WIDTH - 1, cpu_linear.MIN_HEAD_WIDTH, cpu_linear.MIN_WIDTH]
)
def test_a_head_in_float32_equals_the_plain_formula_in_float64(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, width, generator=generator)
    weight = torch.randn(PADDED, width, generator=generator) / 16
    targets = torch.randint(0, VOCABULARY, (13,), generator=generator)
    assert cpu_linear.use_onednn(x, cpu_linear.MIN_HEAD_WIDTH) == (width >= cpu_linear.MIN_HEAD_WIDTH)
    results = []
    for function, dtype in ((linear_cross_entropy, torch.float32), (None, torch.float64)):
        a, b = (t.to(dtype, copy=True).requires_grad_() for t in (x, weight))
        value = function(a, b, targets, VOCABULARY) if function else plain(a, b, targets)
        (value / 3).backward()
        assert a.grad is not None
        assert b.grad is not None
        results.append((value.detach().double(), a.grad.double(), b.grad.double()))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)
    scored = token_losses(x, weight, targets, VOCABULARY)
    torch.testing.assert_close(scored.mean().double(), results[1][0], rtol=1e-5, atol=1e-6)


def test_a_second_backward_is_refused() -> None:
    x, weight, targets = sample(11, torch.float64)
    value = linear_cross_entropy(x.requires_grad_(), weight, targets, VOCABULARY)
    (value * 0.5).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_token_losses_equal_the_plain_formula_at_scored_positions() -> None:
    x, weight, targets = sample(24, torch.float64)
    targets[3] = -1
    ours = token_losses(x.view(2, 12, WIDTH), weight, targets.view(2, 12), VOCABULARY)
    reference = F.cross_entropy(x @ weight[:VOCABULARY].T, targets, ignore_index=-1, reduction="none")
    torch.testing.assert_close(ours, reference.view(2, 12))
    assert ours[0, 3] == 0


def test_no_tensor_of_rows_by_vocabulary_is_saved_for_backward() -> None:
    x, weight, targets = sample(40, torch.float32)
    saved: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), targets, VOCABULARY)
    assert saved
    assert not any(40 in shape and {VOCABULARY, PADDED} & set(shape) for shape in saved)
