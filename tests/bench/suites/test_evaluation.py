"""The evaluation suite: its items, and a run on a tiny model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench import suite
from bench.suites import evaluation
from bench.suites.evaluation import scored_tokens
from gpt2 import hellaswag, tokenizer
from gpt2.hellaswag import Item
from tests.bench.sessions import run_small
from tests.hellaswag_items import real_items

REAL_TOKENS = 3_143_781  # that the model is asked for in the real items, by encode_pair

TINY = evaluation.EvaluatedShape("tiny", 1, 1, 8, 64, micro=1, windows=2, items=3)


@pytest.fixture(scope="module")
def synthetic() -> list[Item]:
    return evaluation.synthetic_items()


def test_synthetic_items_are_as_long_as_the_published_ones(synthetic: list[Item]) -> None:
    real = real_items(0)
    assert scored_tokens(real, 1024) == REAL_TOKENS
    captions = evaluation.VIDEO_CAPTIONS[0]
    for part in (slice(captions), slice(captions, None)):
        for found, stated in zip(lengths(synthetic[part]), lengths(real[part]), strict=True):
            assert np.mean(found) == pytest.approx(np.mean(stated), rel=0.02)
            assert np.std(found) == pytest.approx(np.std(stated), rel=0.1)


def lengths(items: Sequence[Item]) -> tuple[list[int], list[int]]:
    """Tokens of every query and of every ending, as the scorer counts them."""
    encoding = tokenizer.load("gpt2")
    queries = [len(encoding.encode(item.query)) for item in items]
    endings = [
        hellaswag.encode_pair(encoding, item.query, ending)[1] for item in items for ending in item.endings
    ]
    return queries, endings


@pytest.mark.usefixtures("workers_here")
def test_the_suite_measures_prints_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluation, "SHAPES", {"cpu": (TINY,)})
    found = run_small(evaluation.SUITE, tmp_path, monkeypatch, rounds=1, seconds=0)
    shown = capsys.readouterr().out
    assert "EXTRAPOLATED by tokens from 3 items to all 10,042" in shown
    assert (found["schema"], found["suite"]) == (suite.SCHEMA, "evaluation")
    assert {"created", "device", "dtype", "target", "environment"} <= set(found)
    assert [row["case"] for row in found["rows"]] == list(evaluation.CASES)
    assert [sample["case"] for sample in found["samples"]] == list(evaluation.CASES)
    for row, sample in zip(found["rows"], found["samples"], strict=True):
        assert row["hellaswag_seconds"]["low"] > 1000 * sample["hellaswag"] > 0  # 3 of 10,042 items
        assert row["validation_share"]["low"] > 0
