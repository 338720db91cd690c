"""Perplexity of a whole text against lm-evaluation-harness's windows, written from their definition."""

import contextlib
import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2 import evaluator
from gpt2.initial_weights import initialise
from gpt2.transformer import GPT2
from gpt2.validation import EvalText
from referee.verdict.rows import Row
from runtime.records import read_items, read_rows, write_rows

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
    return EvalText("t", [draw.integers(0, EOT, length) for length in lengths], words, size, "a")


def score(model: GPT2, text: EvalText, batch_tokens: int = 64) -> list[float]:
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
    assert found == pytest.approx(expected, rel=1e-6)  # losses of tokens are float32


def test_a_text_has_a_row_for_its_loss_with_its_windows_and_for_its_counts(tmp_path: Path) -> None:
    text, row = a_text([30, 10], words=8, size=200), Row("s", "B", 0, "x", "fp32", "", "loss", 7, 0.0)
    rows = evaluator.text_rows(tmp_path, row, text, [50.0, 30.0])
    values = {"loss": 2.0, "documents": 2, "tokens": 40, "words": 8, "bytes": 200}
    assert {row.metric: row.value for row in rows} == values
    assert {(row.data, row.tokens) for row in rows} == {("t@a", 7)}
    assert read_items(tmp_path, rows[0]).tolist() == [50.0, 30.0]
    broken = evaluator.text_rows(tmp_path, row, text, [math.nan, 1.0])
    write_rows(tmp_path, broken)
    assert [row.metric for row in read_rows(tmp_path, ("s", "B", 0))] == [
        "documents",
        "tokens",
        "words",
        "bytes",
    ]
