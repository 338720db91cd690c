"""Held-out texts at the end of a run: the same numbers after an interruption, and a text that is missing."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from runtime import run_record
from runtime.records import owner, read_rows
from runtime.settings import Config, EvalSet
from tests import small_runs
from tests.small_runs import StopAfter, outcome, same, start

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    texts = small_runs.write_texts(tmp_path / "texts")
    (tmp_path / "news.md").write_text("A held-out text, with words that no story has: zebra. " * 20)
    config = small_runs.configuration(texts, 3)
    sets = (EvalSet("news", str(tmp_path / "news.md")), EvalSet("stories", str(texts / "0*.txt")))
    return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, sets=sets))


def texts_of(run_dir: Path) -> dict[str, dict[str, float]]:
    """Return text -> metric -> value, of the texts beside the validation."""
    study = owner(run_dir).partition("/")[0]
    found: dict[str, dict[str, float]] = {}
    for row in read_rows(run_dir, (study, "B", 0)):
        if row.dataset in ("news", "stories"):
            found.setdefault(row.dataset, {})[row.metric] = row.value
    return found


def test_a_run_records_each_text_and_its_windows(config: Config, tmp_path: Path) -> None:
    run = start(tmp_path / "run", config)
    assert run.train() == "finished"
    found = texts_of(tmp_path / "run")
    assert list(found) == ["news", "stories"]
    assert found["stories"]["documents"] == 10
    nats = np.load(tmp_path / "run/items/loss-news.npy").sum()
    assert nats / found["news"]["tokens"] == pytest.approx(found["news"]["loss"])
    assert run_record.load(tmp_path / "run").clock.evaluate > 0


def test_a_run_that_stops_in_any_evaluation_resumes_to_the_same_numbers(
    config: Config, tmp_path: Path
) -> None:
    start(tmp_path / "whole", config).train()
    whole = tmp_path / "whole"
    interrupted = []
    for checks in range(1, 40):
        folder = tmp_path / f"{checks}"
        run = start(folder, config, stop=StopAfter(checks))
        if run.train() == "finished":
            break
        interrupted.append(run.iteration)
        assert start(folder, config).train() == "finished"
        assert same(outcome(folder), outcome(whole))
        assert texts_of(folder) == texts_of(whole)
        names = [path.relative_to(whole) for path in whole.glob("items/*")]
        assert [(folder / name).read_bytes() for name in names] == [
            (whole / name).read_bytes() for name in names
        ]
    assert interrupted.count(3) >= 3  # in the last validation and in each text


def test_a_text_that_vanished_is_a_note_and_the_run_finishes(config: Config, tmp_path: Path) -> None:
    (tmp_path / "news.md").unlink()
    assert start(tmp_path / "run", config).train() == "finished"
    record = run_record.load(tmp_path / "run")
    assert list(texts_of(tmp_path / "run")) == ["stories"]
    assert any("news is not evaluated: CONFIG_EVAL_SETS: news: " in note for note in record.notes)
