"""`make` after a text was added to CONFIG_EVAL_SETS: finished runs are evaluated, not trained."""

import json
from pathlib import Path

import pytest

from gpt2.artifacts import run_record
from tests.faults.in_process import train
from tests.faults.workplace import Workplace, write_stories

SETTINGS = {"VARIANTS": "B RAALL RALEARN", "GPT2_MAX_ITERS": "4", "EVAL_INTERVAL_TOKENS": "0"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stories(tmp_path_factory.mktemp("texts"))


def test_a_text_that_is_added_later_is_evaluated_without_training_again(tmp_path: Path, texts: Path) -> None:
    place = Workplace(tmp_path, texts, **SETTINGS)
    for name in ("news", "more"):
        (tmp_path / f"{name}.txt").write_text(f"A {name} text that no run was trained on. " * 40)
    place.configure(**SETTINGS, EVAL_SETS="news=news.txt")
    first = train(place)
    assert first.returncode == 0, first.stdout
    assert "eval set news: 1 document, 361 words" in first.stdout
    assert "Held-out texts" in (place.study / "report.md").read_text()
    runs = ("B0", "RAALL0", "RALEARN0")
    before = {name: (place.run_dir(name) / "run.json").read_bytes() for name in runs}
    same = place.here("scripts.study")
    assert "nothing to run" in same.stdout
    assert "evaluating" not in same.stdout

    place.configure(**SETTINGS, EVAL_SETS="news=news.txt more=more.txt again=news.txt")
    second = train(place)
    assert second.returncode == 0, second.stdout
    assert "evaluating 3 finished runs on the texts that they lack" in second.stdout
    assert {name: (place.run_dir(name) / "run.json").read_bytes() for name in runs} == before
    report = json.loads((place.study / "report.json").read_text())
    tables = {table["name"]: table for table in report["eval_sets"]["tables"]}
    assert list(tables) == ["news", "more", "again"]
    # the same text later gives the numbers of the run's end to the bit
    assert tables["again"]["rows"] == tables["news"]["rows"]
    assert tables["more"]["rows"] != tables["news"]["rows"]
    for name in runs:
        found = json.loads((place.run_dir(name) / "eval_sets.json").read_text())["sets"]
        assert found["again"]["window_nats"] == found["news"]["window_nats"]
        assert found["news"]["entry"] == json.loads(before[name])["eval_sets"]["news"]
    assert "evaluating" not in place.here("scripts.study").stdout

    verified = place.here("scripts.verify", "results/gpt2-ra-ablation-smoke")
    assert "eval_sets.json" in verified.stdout
    assert verified.returncode == 0, verified.stdout


def test_a_text_that_is_missing_ends_make_with_its_name_and_harms_nothing(
    tmp_path: Path, texts: Path
) -> None:
    place = Workplace(tmp_path, texts, **SETTINGS | {"VARIANTS": "B"})
    assert train(place).returncode == 0
    (tmp_path / "news.txt").write_text("A text that no run was trained on. " * 40)
    place.configure(**SETTINGS | {"VARIANTS": "B"}, EVAL_SETS="news=news.txt")
    (tmp_path / "news.txt").unlink()
    refused = train(place)
    assert refused.returncode == 1
    assert "error: CONFIG_EVAL_SETS: news: 'news.txt' matches no file; fix: " in refused.stdout
    assert run_record.load(place.run_dir()).status == "finished"
    again = place.here(
        "scripts.kconfig", "defconfig", "gpt2-ra-ablation-smoke", "CONFIG_EVAL_SETS=news=news.txt"
    )
    assert again.returncode == 1
    assert "CONFIG_EVAL_SETS: news: 'news.txt' matches no file" in again.stdout
