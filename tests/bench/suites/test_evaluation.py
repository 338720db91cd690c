"""The evaluation suite: its items, its arithmetic, and a run on a tiny model."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import suite
from bench.suites import evaluation
from bench.suites.evaluation import EvaluationTiming, Whole, evaluate_once, rows_of, scored_tokens, table
from bench.temporary_studies import configure_study
from gpt2.config.config import TargetConfig
from gpt2.data import tokenizer
from gpt2.eval import hellaswag
from gpt2.eval.hellaswag import Item
from gpt2.eval.validation import perplexity
from gpt2.hardware import attention_kernels, resolve
from tests.bench.sessions import run_small
from tests.hellaswag_items import FIXTURE, real_items

REAL_TOKENS = 3_143_781  # that the model is asked for in the real items, by encode_pair
WHOLE = Whole(1000, 10_000, 50, 2000)

TINY = evaluation.EvaluatedShape("tiny", 1, 1, 8, 64, micro=1, windows=2, items=3)


@pytest.fixture(scope="module")
def synthetic() -> list[Item]:
    return evaluation.synthetic_items()


# --- items


def test_synthetic_items_have_as_many_tokens_as_the_published_ones(synthetic: list[Item]) -> None:
    assert len(synthetic) == 10_042
    assert scored_tokens(synthetic, 1024) == pytest.approx(REAL_TOKENS, rel=0.01)


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


def test_synthetic_items_are_equal_for_one_seed_and_differ_between_seeds(synthetic: list[Item]) -> None:
    assert evaluation.synthetic_items() == synthetic
    assert evaluation.synthetic_items(seed=1) != synthetic


def test_scored_tokens_are_truncated_at_the_block_size() -> None:
    item = Item("the cat sat", ("on it", "on it", "on it", "on it"), 0)
    assert scored_tokens([item], 1024) == 4 * 4
    assert scored_tokens([item], 3) == 4 * 3


# --- arithmetic


def sample(case: str, validation_seconds: float, hellaswag_seconds: float, peak: int = 1) -> EvaluationTiming:
    return EvaluationTiming(case, 500, validation_seconds, 5, 100, hellaswag_seconds, peak)


def test_the_table_extrapolates_a_share_by_its_tokens() -> None:
    samples = [
        sample("B", 1.0, 2.0, peak=7),
        sample("RALEARN", 2.0, 8.0),
        sample("B", 4.0, 1.0, peak=9),
        sample("RALEARN", 2.0, 8.0),
        sample("B", 2.0, 3.0),
        sample("RALEARN", 2.0, 8.0),
    ]
    rows = rows_of(samples, {"B": 250.0, "RALEARN": 100.0}, WHOLE)
    assert [row["case"] for row in rows] == ["B", "RALEARN"]
    first = rows[0]
    assert (
        first["hellaswag_seconds"].items() >= {"median": 40.0, "least": 20.0, "most": 60.0}.items()
    )  # 2,000 of 100 tokens
    assert first["validation_seconds"].items() >= {"median": 4.0, "least": 2.0, "most": 8.0}.items()
    assert first["validation_share"]["median"] == pytest.approx(4.0 / 40)  # 10,000 training tokens take 40 s
    assert first["peak_bytes"] == 9
    assert rows[1]["validation_share"]["median"] == pytest.approx(4.0 / 100)
    shown = str(table(rows, samples, WHOLE))
    assert "3 rounds, median [" in shown
    assert "EXTRAPOLATED by tokens from 5 items to all 50" in shown
    assert "EXTRAPOLATED from 500 tokens to all 1,000" in shown
    assert "one validation each 10,000 training tokens" in shown
    assert "(B 250, RALEARN 100 tokens/s)" in shown


def test_a_complete_measurement_is_not_called_extrapolated() -> None:
    whole = EvaluationTiming("B", 1000, 1.0, 50, 2000, 30.0, 1)
    rows = rows_of([whole], {"B": 250.0}, WHOLE)
    assert rows[0]["hellaswag_seconds"]["median"] == 30.0
    assert "EXTRAPOLATED" not in str(table(rows, [whole], WHOLE))


# --- measuring


def test_the_scorer_gets_every_item_once_and_validation_every_window(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Item] = []
    windows: list[Any] = []
    score = hellaswag.score

    def counted(model: Any, items: Sequence[Item], *arguments: Any, **named: Any) -> Any:
        asked.extend(items)
        return score(model, items, *arguments, **named)

    def watched(model: Any, ids: Any, *arguments: Any) -> Any:
        windows.append(ids.shape)
        return perplexity(model, ids, *arguments)

    monkeypatch.setattr("gpt2.eval.hellaswag.score", counted)
    monkeypatch.setattr("gpt2.eval.validation.perplexity", watched)
    resolved = resolve.resolve(TargetConfig("cpu", "auto", False, 1, "cpu", False))
    monkeypatch.setattr(attention_kernels, "prepare_device", lambda config, model: resolved)
    items = hellaswag.load_items(FIXTURE, 0)
    found = evaluate_once(TINY, "RALEARN", 70, items)
    assert Counter(asked) == Counter(items)
    assert windows == [(64, 65), (70, 65)]  # one batch of 4,096 tokens to warm up, then all
    assert (found.items, found.validation_tokens) == (len(items), 70 * 64)
    assert found.item_tokens == scored_tokens(items, 64)


def test_costs_are_those_of_the_main_study_on_the_card_of_the_goal(tmp_path: Path) -> None:
    config = configure_study(tmp_path, evaluation.STUDY).config
    assert (config.evaluation.tokens, config.evaluation.interval_tokens) == (1_048_576, 52_428_800)
    assert config.model.block_size == 1024


@pytest.mark.usefixtures("workers_here")
def test_the_suite_measures_prints_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluation, "SHAPES", {"cpu": (TINY,)})
    found = run_small(evaluation.SUITE, tmp_path, monkeypatch, rounds=1, seconds=0)
    shown = capsys.readouterr().out
    assert "1 rounds, median [95 % interval; below 6 rounds the range]" in shown
    assert "EXTRAPOLATED by tokens from 3 items to all 10,042" in shown
    assert (found["schema"], found["suite"]) == (suite.SCHEMA, "evaluation")
    assert {"created", "device", "dtype", "target", "environment"} <= set(found)
    assert [row["case"] for row in found["rows"]] == list(evaluation.CASES)
    assert [(row["case"], row["items"]) for row in found["samples"]] == [
        (case, 3) for case in evaluation.CASES
    ]
    assert all(
        row["hellaswag_seconds"]["least"] > 0 < row["validation_share"]["least"] for row in found["rows"]
    )
