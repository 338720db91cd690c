import contextlib
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.initial_weights import initialise
from gpt2.transformer import GPT2
from gpt2.validation import evaluating, perplexity

VOCABULARY, T = 61, 12


@pytest.fixture
def model() -> GPT2:
    model = GPT2(
        layers=2, heads=2, width=16, block_size=T, vocabulary=VOCABULARY, padded_vocabulary=128, dropout=0.5
    )
    initialise(model, seed=3)
    return model


@pytest.fixture
def windows() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, (7, T + 1)).astype(np.uint16)


class Constant(nn.Module):
    """Gives every token the same loss."""

    def __init__(self, loss: float) -> None:
        super().__init__()
        self.loss = loss

    def token_losses(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return torch.full(ids_BT.shape, self.loss)


def test_the_loss_is_the_mean_of_the_mean_losses_of_the_windows(model: GPT2, windows: np.ndarray) -> None:
    model.double().eval()
    ids = torch.from_numpy(windows.astype(np.int64))
    logits = model(ids[:, :-1]).transpose(1, 2)
    expected = F.cross_entropy(logits, ids[:, 1:], reduction="none").mean(1)
    for batch in (1, 3, 7):
        scored = perplexity(model, windows, batch, "cpu", contextlib.nullcontext)
        assert scored.window_losses == pytest.approx(expected.tolist(), rel=1e-12)
        assert np.mean(scored.window_losses) == pytest.approx(scored.loss, rel=1e-12)


def test_many_small_losses_are_summed_in_float64() -> None:
    value = float(torch.tensor(0.1))
    windows = np.zeros((300, 1001), np.uint16)
    assert perplexity(Constant(0.1), windows, 7, "cpu", contextlib.nullcontext).loss == pytest.approx(
        value, rel=1e-13
    )


@pytest.mark.parametrize("loss", [1e4, math.inf, math.nan])
def test_a_perplexity_that_is_not_finite_is_none(loss: float) -> None:
    found = perplexity(Constant(loss), np.zeros((2, 3), np.uint16), 1, "cpu", contextlib.nullcontext)
    assert found.perplexity is None
    assert found.loss == pytest.approx(loss, nan_ok=True)


def test_modules_gradients_and_kernels_are_restored_even_after_an_error(model: GPT2) -> None:
    model.train()
    model.blocks[1].eval()
    before = [module.training for module in model.modules()]

    def fail() -> None:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_stop_is_checked_before_each_batch_and_ends_the_evaluation(model: GPT2, windows: np.ndarray) -> None:
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    model.train()
    with pytest.raises(KeyboardInterrupt):
        perplexity(model, windows, 2, "cpu", contextlib.nullcontext, stop)
    assert model.training
    calls = -10
    perplexity(model, windows, 2, "cpu", contextlib.nullcontext, stop)
    assert calls == -6


@pytest.mark.parametrize("shape", [(0, 5), (3, 1), (4,)])
def test_windows_without_a_target_token_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="windows of shape"):
        perplexity(Constant(1.0), np.zeros(shape, np.uint16), 2, "cpu", contextlib.nullcontext)
