"""The evaluation suite: its items, its arithmetic, and a run on a tiny model."""

import dataclasses
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import evaluation_cost as cost
from bench.cases import find_shape
from bench.suites import evaluation
from bench.temporary_studies import configure_study
from gpt2.config.config import TargetConfig
from gpt2.data import tokenizer
from gpt2.eval import hellaswag, hellaswag_download
from gpt2.eval.hellaswag import Item
from gpt2.hardware import resolve
from gpt2.system.errors import UserError
from gpt2.train.peak_memory import PeakMeter
from tests.bench.sessions import run_small
from tests.hellaswag_items import FIXTURE, real_items

SEPARATE = 0.02  # of the mean: what drawing queries and endings apart, and from quantiles, may cost
REAL_TOKENS = 3_143_781  # that the model is asked for in the real items, by encode_pair
WHOLE = cost.Whole(1000, 10_000, 100.0, 50, 2000)


def lengths(items: Sequence[Item]) -> tuple[list[int], list[int]]:
    """Tokens of every query and of every ending, as the scorer counts them."""
    encoding = tokenizer.load()
    queries = [len(encoding.encode_ordinary(item.query)) for item in items]
    endings = [
        hellaswag.encode_pair(encoding, item.query, ending)[1] for item in items for ending in item.endings
    ]
    return queries, endings


@pytest.fixture(scope="module")
def made() -> list[Item]:
    return cost.synthetic_items(tokenizer.load())


# --- items


def test_synthetic_items_are_as_long_as_the_quantiles_say(made: list[Item]) -> None:
    start = 0
    for kind in cost.KINDS:
        queries, endings = lengths(made[start : start + kind.items])
        start += kind.items
        middle = slice(1, -2)  # the rarest lengths are seen a few times only
        for seen, stated in ((queries, kind.query), (endings, kind.ending)):
            found = np.percentile(seen, cost.LEVELS)
            assert np.abs(found - stated)[middle].max() <= 1.5
            assert stated[0] <= min(seen) <= max(seen) <= stated[-1]
    assert start == len(made) == 10_042


def test_synthetic_items_have_as_many_tokens_as_the_published_ones(made: list[Item]) -> None:
    tokens = cost.scored_tokens(made, tokenizer.load(), 1024)
    assert tokens == pytest.approx(REAL_TOKENS, rel=SEPARATE)


def test_the_stated_quantiles_are_those_of_the_published_items() -> None:
    items = real_items(0)
    assert cost.scored_tokens(items, tokenizer.load(), 1024) == REAL_TOKENS
    start = 0
    for kind in cost.KINDS:
        queries, endings = lengths(items[start : start + kind.items])
        start += kind.items
        assert tuple(np.percentile(queries, cost.LEVELS)) == pytest.approx(kind.query, abs=0.5)
        assert tuple(np.percentile(endings, cost.LEVELS)) == pytest.approx(kind.ending, abs=0.5)


def test_synthetic_items_are_equal_for_one_seed_and_differ_between_seeds(made: list[Item]) -> None:
    encoding = tokenizer.load()
    assert cost.synthetic_items(encoding) == made
    assert cost.synthetic_items(encoding, seed=1) != made


def test_scored_tokens_are_truncated_at_the_block_size() -> None:
    item = Item("the cat sat", ("on it", "on it", "on it", "on it"), 0)
    assert cost.scored_tokens([item], tokenizer.load(), 1024) == 4 * 4
    assert cost.scored_tokens([item], tokenizer.load(), 3) == 4 * 3


# --- arithmetic


def sample(case: str, validation_seconds: float, hellaswag_seconds: float, peak: int = 1) -> cost.Sample:
    return cost.Sample(case, 500, validation_seconds, 5, 100, hellaswag_seconds, peak)


def test_the_table_extrapolates_a_share_by_its_tokens() -> None:
    samples = [
        sample("B", 1.0, 2.0, peak=7),
        sample("RALEARN", 2.0, 8.0),
        sample("B", 4.0, 1.0, peak=9),
        sample("RALEARN", 2.0, 8.0),
        sample("B", 2.0, 3.0),
    ]
    rows = cost.rows_of(samples, {"B": 250.0, "RALEARN": 100.0}, WHOLE)
    assert [row["case"] for row in rows] == ["B", "RALEARN"]
    first = rows[0]
    assert first["rounds"] == 3
    assert (
        first["hellaswag_seconds"].items() >= {"median": 40.0, "least": 20.0, "most": 60.0}.items()
    )  # 2,000 of 100 tokens
    assert first["items_per_second"]["median"] == 50 / 40
    assert (
        first["validation_tokens_per_second"].items()
        >= {"median": 250.0, "least": 125.0, "most": 500.0}.items()
    )
    assert first["validation_seconds"].items() >= {"median": 4.0, "least": 2.0, "most": 8.0}.items()
    assert first["validations"] == 3  # 25,000 tokens: at 10,000, at 20,000 and at the end
    assert first["validation_share"]["median"] == pytest.approx(3 * 4.0 / 100)
    assert first["peak_bytes"] == 9
    assert rows[1]["validations"] == 1
    shown = str(cost.table(rows, WHOLE))
    assert "EXTRAPOLATED by tokens from 5 items to all 50" in shown
    assert "EXTRAPOLATED from 500 tokens to all 1,000" in shown
    assert "B 3 (250 tokens/s), RALEARN 1 (100 tokens/s): every 10,000 training tokens" in shown


def test_a_complete_measurement_is_not_called_extrapolated() -> None:
    whole = cost.Sample("B", 1000, 1.0, 50, 2000, 30.0, 1)
    rows = cost.rows_of([whole], {"B": 250.0}, WHOLE)
    assert rows[0]["hellaswag_seconds"]["median"] == 30.0
    assert "EXTRAPOLATED" not in str(cost.table(rows, WHOLE))


@pytest.mark.parametrize(
    ("rate", "count"), [(1.0, 1), (100.0, 1), (100.01, 2), (200.0, 2), (250.0, 3), (0.0, 1)]
)
def test_validations_are_counted_on_the_grid_and_once_at_the_end(rate: float, count: int) -> None:
    assert cost.validations(WHOLE, rate) == count
    assert cost.validations(dataclasses.replace(WHOLE, interval_tokens=0), rate) == 1


def test_the_goal_is_met_or_not_and_a_smaller_card_has_more_time() -> None:
    rows = cost.rows_of([cost.Sample("B", 1000, 0.5, 50, 2000, 90.0, 1)], {"B": 250.0}, WHOLE)
    same = cost.goals(rows, 1e15, 1e15)
    assert "HellaSwag NOT within 60 s, validation within 3% of a run" in same
    assert "in proportion" not in same
    assert "HellaSwag within 120 s" in cost.goals(rows, 5e14, 1e15)
    assert "in proportion to peak FLOPs" in cost.goals(rows, 5e14, 1e15)
    assert "NOT within 60 s" in cost.goals(rows, 2e15, 1e15)


# --- measuring


def test_the_scorer_gets_every_item_once_and_validation_every_window(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Item] = []
    windows: list[Any] = []
    score, perplexity = hellaswag.score, real_perplexity()

    def counted(model: Any, items: Sequence[Item], *arguments: Any, **named: Any) -> Any:
        asked.extend(items)
        return score(model, items, *arguments, **named)

    def seen(model: Any, ids: Any, *arguments: Any) -> Any:
        windows.append(len(ids))
        return perplexity(model, ids, *arguments)

    monkeypatch.setattr("gpt2.eval.hellaswag.score", counted)
    monkeypatch.setattr("gpt2.eval.validation.perplexity", seen)
    shape = dataclasses.replace(evaluation.TINY, items=0, windows=70)
    made = evaluation.make_material(shape, 1 << 20, FIXTURE)
    resolved = resolve.resolve(TargetConfig("cpu", "auto", False, 1, "cpu", False))
    found = evaluation.evaluate_once(shape, "RALEARN", resolved, made, PeakMeter("cpu"))
    assert Counter(asked) == Counter(hellaswag.load_items(FIXTURE, 0))
    assert windows == [64, 70]  # one batch of 4,096 tokens to warm up, then all
    assert (found.items, found.validation_tokens) == (len(asked), 70 * 64)
    assert found.item_tokens == made.whole_item_tokens


def real_perplexity() -> Any:
    from gpt2.eval import validation

    return validation.perplexity


def test_a_share_selects_the_same_items_at_every_run() -> None:
    one, two = (evaluation.make_material(evaluation.TINY, 1 << 20, FIXTURE) for _ in range(2))
    everything = hellaswag.load_items(FIXTURE, 0)
    assert one.items == two.items
    assert len(one.items) == len(set(one.items)) == evaluation.TINY.items
    assert set(one.items) <= set(everything)
    assert one.whole_items == len(everything)
    assert f"timed: {evaluation.TINY.items} of them" in one.source


def test_without_a_limit_the_windows_are_those_of_a_study() -> None:
    shape = dataclasses.replace(evaluation.TINY, windows=0)
    assert evaluation.make_material(shape, 1000, FIXTURE).windows.shape == (15, 65)


def test_costs_are_those_of_the_main_study_on_the_card_of_the_goal(tmp_path: Path) -> None:
    config = configure_study(tmp_path, evaluation.STUDY).config
    assert config.budget.max_time_seconds == 7200
    assert (config.evaluation.tokens, config.evaluation.interval_tokens) == (1_048_576, 52_428_800)
    assert config.model.block_size == 1024


def test_the_suite_measures_prints_and_saves(
    one_thread: None, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "data").mkdir()
    shutil.copy(FIXTURE, elsewhere / "data" / hellaswag_download.FILE_NAME)
    monkeypatch.setattr("gpt2.hardware.attention_kernels.cpu_threads", lambda requested: 1)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # of the workers
    found = run_small(evaluation.SUITE, elsewhere, monkeypatch, shape="tiny", rounds=2, seconds=0)
    shown = capsys.readouterr().out
    assert f"the items of data/{hellaswag_download.FILE_NAME}" in shown
    assert "2 rounds, median [95 % interval; below 6 rounds the range]" in shown
    assert (found["schema"], found["suite"]) == (3, "evaluation")
    assert {"created", "device", "dtype", "target", "environment"} <= set(found)
    assert [row["case"] for row in found["rows"]] == list(evaluation.CASES)
    assert [row["case"] for row in found["samples"]] == list(evaluation.CASES) * 2
    assert all(row["hellaswag_seconds"]["least"] > 0 < row["validations"] for row in found["rows"])


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(UserError, match="unknown shape '350m'; shapes: 124m-t256, tiny"):
        find_shape(evaluation.SHAPES["cpu"], "350m")
