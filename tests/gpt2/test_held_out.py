"""Held-out texts at the end of a run: the same numbers after an interruption, and a text that is missing."""

import dataclasses
from pathlib import Path

import pytest

from runtime import run_record
from runtime.records import parse, read_plain
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


def texts_of(run_dir: Path) -> dict[str, run_record.EvaluatedText]:
    content = read_plain(run_dir / run_record.EVAL_SETS_FILE)
    return dict(parse(run_record.EvalSetsFile, content, run_record.EVAL_SETS_FILE).sets)


def test_a_run_records_each_text_and_its_windows(config: Config, tmp_path: Path) -> None:
    run = start(tmp_path / "run", config)
    assert run.train() == "finished"
    record = run_record.load(tmp_path / "run")
    found = texts_of(tmp_path / "run")
    assert {name: text.entry for name, text in found.items()} == record.eval_sets
    assert list(record.eval_sets) == ["news", "stories"]
    assert record.eval_sets["stories"].documents == 10
    assert sum(found["news"].window_nats) / record.eval_sets["news"].tokens == pytest.approx(
        record.eval_sets["news"].loss
    )
    assert (found["news"].device, found["news"].dtype) == (record.target.device, record.target.dtype)
    assert record.clock.evaluate > 0


def test_a_run_that_stops_in_any_evaluation_resumes_to_the_same_numbers(
    config: Config, tmp_path: Path
) -> None:
    start(tmp_path / "whole", config).train()
    whole = run_record.load(tmp_path / "whole").eval_sets
    interrupted = []
    for checks in range(1, 40):
        folder = tmp_path / f"{checks}"
        run = start(folder, config, stop=StopAfter(checks))
        if run.train() == "finished":
            break
        interrupted.append(run.iteration)
        before = run_record.load(folder)
        assert before.eval_sets is None
        assert start(folder, config).train() == "finished"
        assert run_record.load(folder).eval_sets == whole
        assert same(outcome(folder), outcome(tmp_path / "whole"))
        written = [texts_of(one) for one in (folder, tmp_path / "whole")]
        assert written[0] == written[1]
    assert interrupted.count(3) >= 3  # in the last validation and in each text


def test_a_text_that_vanished_is_a_note_and_the_run_finishes(config: Config, tmp_path: Path) -> None:
    (tmp_path / "news.md").unlink()
    assert start(tmp_path / "run", config).train() == "finished"
    record = run_record.load(tmp_path / "run")
    assert list(record.eval_sets) == ["stories"]
    assert any("news is not evaluated: CONFIG_EVAL_SETS: news: " in note for note in record.notes)
