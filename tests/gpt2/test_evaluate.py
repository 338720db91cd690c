import contextlib
import math

import numpy as np
import pytest
import torch

from gpt2.evaluate import perplexity
from gpt2.model import GPT2, initialise

WINDOWS = np.random.default_rng(0).integers(0, 97, (7, 17)).astype(np.uint16)


def model(dropout: float = 0.0) -> GPT2:
    made = GPT2(
        layers=2, heads=2, width=16, block_size=16, vocabulary=97, padded_vocabulary=128, dropout=dropout
    )
    initialise(made, 0)
    return made.double()


def test_the_loss_is_the_mean_cross_entropy_and_does_not_depend_on_the_batch() -> None:
    made = model()
    ids = torch.from_numpy(WINDOWS.astype(np.int64))
    expected = torch.nn.functional.cross_entropy(made(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item()
    for batch in (1, 2, 3, 7, 100):
        seen = perplexity(made, WINDOWS, batch, "cpu", contextlib.nullcontext)
        assert seen.loss == pytest.approx(expected, rel=1e-12)
        assert seen.perplexity == pytest.approx(math.exp(expected))
        assert seen.tokens == 7 * 16


def test_the_losses_of_the_windows_are_means_whose_mean_is_the_loss() -> None:
    made = model()
    ids = torch.from_numpy(WINDOWS.astype(np.int64))
    logits = made(ids[:, :-1]).transpose(1, 2)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none").mean(1)
    for batch in (1, 3, 7):
        seen = perplexity(made, WINDOWS, batch, "cpu", contextlib.nullcontext)
        assert seen.window_losses == pytest.approx(expected.tolist(), rel=1e-12)
        assert np.mean(seen.window_losses) == pytest.approx(seen.loss, rel=1e-12)


def test_evaluation_has_no_dropout_and_leaves_the_model_as_it_was() -> None:
    made = model(dropout=0.5).train()
    first = perplexity(made, WINDOWS, 4, "cpu", contextlib.nullcontext)
    assert first == perplexity(made, WINDOWS, 4, "cpu", contextlib.nullcontext)
    assert made.training

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perplexity(made, WINDOWS, 4, "cpu", contextlib.nullcontext, stop=stop)
    assert made.training


def test_a_loss_beyond_a_float_has_no_perplexity() -> None:
    class Hopeless(torch.nn.Module):
        def token_losses(self, ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
            return torch.full(targets_BT.shape, 1e4)

    seen = perplexity(Hopeless(), WINDOWS, 4, "cpu", contextlib.nullcontext)  # type: ignore[arg-type]
    assert seen.loss == 1e4
    assert seen.perplexity is None
