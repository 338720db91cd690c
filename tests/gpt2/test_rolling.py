"""Perplexity of a whole text against lm-evaluation-harness's windows, written from their definition."""

import contextlib
import itertools
import math
import random

import numpy as np
import pytest
import torch

from gpt2 import evaluator
from gpt2.initial_weights import initialise
from gpt2.transformer import GPT2
from gpt2.validation import EvalText

EOT = 96


def harness_windows(tokens: list[int], prefix: int, length: int) -> list[tuple[list[int], list[int]]]:
    """`loglikelihood_rolling` of 0.4.13: rolling windows with a context of 1 token, made disjoint."""
    rolled = []
    predicted = 0
    while predicted < len(tokens):
        count = min(length, len(tokens) - predicted)
        end = predicted + count
        padded = [prefix, *tokens]  # padded[i] precedes tokens[i]
        begin = 0 if predicted == 0 else end - length
        context, targets = padded[begin:end], tokens[end - count : end]
        rolled.append((context, targets))
        predicted = end
    return [(context[: len(context) - (len(targets) - 1)], targets) for context, targets in rolled]


def a_model(block_size: int = 8) -> GPT2:
    model = GPT2(layers=2, heads=2, width=16, block_size=block_size, vocabulary=97, padded_vocabulary=128)
    initialise(model, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(20)
    return model.double()


def a_text(lengths: list[int], words: int = 11, size: int = 40) -> EvalText:
    draw = np.random.default_rng(sum(lengths))
    return EvalText("t", [draw.integers(0, EOT, length) for length in lengths], words, size, "a", "b")


def score(model: GPT2, text: EvalText, batch_tokens: int = 64) -> evaluator.TextScore:
    return evaluator.score(
        model,
        text,
        EOT,
        batch_tokens=batch_tokens,
        block_size=8,
        device="cpu",
        autocast=contextlib.nullcontext,
    )


def test_windows_are_those_of_the_harness() -> None:
    draw = random.Random(1)
    for length, count in itertools.product((1, 2, 3, 8), range(40)):
        tokens = [draw.randrange(EOT) for _ in range(count)]
        found = [
            (row[: len(row) - scored].tolist(), row[len(row) - scored :].tolist())
            for row, scored in evaluator.windows(np.array(tokens, dtype=np.int64), EOT, length)
        ]
        assert found == harness_windows(tokens, EOT, length)


def test_the_nats_are_those_of_the_models_probabilities_window_by_window() -> None:
    model, text = a_model(), a_text([1, 7, 8, 9, 30, 16])
    expected = []
    for document in text.documents:
        for context, targets in harness_windows(document.tolist(), EOT, 8):
            ids = torch.tensor([(context + targets)[:-1]])
            chances = model(ids).detach()[0].log_softmax(-1)[-len(targets) :]
            expected.append(-float(chances[range(len(targets)), targets].sum()))
    found = score(model, text)
    assert found.window_nats == pytest.approx(expected, rel=1e-6)  # losses of tokens are float32
    assert found.window_tokens == [1, 7, 8, 8, 1, 8, 8, 8, 6, 8, 8]
    assert sum(found.window_tokens) == text.tokens


def test_the_record_has_the_perplexities_by_token_word_and_byte() -> None:
    text = a_text([30, 10], words=8, size=200)
    nats = [50.0, 30.0]
    found = evaluator.entry(text, evaluator.TextScore(nats, [30, 10]))
    assert (found.documents, found.tokens, found.words, found.bytes) == (2, 40, 8, 200)
    assert found.loss == 2.0
    assert found.perplexity == pytest.approx(math.exp(2))
    assert found.word_perplexity == pytest.approx(math.exp(10))
    assert found.byte_perplexity == pytest.approx(math.exp(0.4))
    assert found.bits_per_byte == pytest.approx(math.log2(found.byte_perplexity))


def test_a_loss_that_is_not_finite_gives_no_number() -> None:
    text = a_text([30, 10], words=1)
    broken = evaluator.entry(text, evaluator.TextScore([math.nan, 1.0], [30, 10]))
    assert broken.loss is broken.perplexity is broken.word_perplexity is broken.bits_per_byte is None
    large = evaluator.entry(text, evaluator.TextScore([400.0, 1.0], [30, 10]))
    assert large.word_perplexity is None
    assert large.perplexity is not None
