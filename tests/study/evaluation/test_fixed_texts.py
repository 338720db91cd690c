"""`make` with CONFIG_EVAL_SETS: the texts are in the report, and fixed by the first `make`."""

from pathlib import Path

from tests.faults.in_process import train
from tests.faults.workplace import Workplace, write_stories

SETTINGS = {"VARIANTS": "B", "GPT2_MAX_ITERS": "4", "EVAL_INTERVAL_TOKENS": "0"}


def test_a_study_evaluates_its_texts_and_refuses_another_one(tmp_path: Path) -> None:
    place = Workplace(tmp_path, write_stories(tmp_path / "stories"), **SETTINGS)
    (tmp_path / "news.txt").write_text("A text that no run was trained on. " * 40)
    place.configure(**SETTINGS, EVAL_SETS="news=news.txt")
    first = train(place)
    assert first.returncode == 0, first.stdout
    assert "Held-out texts" in (place.study / "report.md").read_text()
    verified = place.here("scripts.verify", "results/gpt2-ra-ablation-smoke")
    assert verified.returncode == 0, verified.stdout
    assert "items/loss-news.npy" in (place.run_dir() / "SHA256SUMS").read_text()
    place.configure(**SETTINGS, EVAL_SETS="news=news.txt more=news.txt")
    second = train(place)
    assert second.returncode == 1
    assert "CONFIG_EVAL_SETS: " in second.stdout
