"""`make` with two learning rates and a very small model: first in processes, then in this one."""

from fractions import Fraction
from pathlib import Path

import pytest

from gpt2.config.config import Config
from gpt2.config.dotconfig import read_symbols, read_text
from study.records.verify import verify_study
from study.runner.extend import ExtendError, extend
from study.runner.settings import StudySettings
from tests.faults.in_process import train
from tests.faults.workplace import Workplace, write_stories

SETTINGS = {
    "VARIANTS": "B",
    "LEARNING_RATES": "1e-3 1e-2",
    "TUNING_SEEDS": "1",
    "GPT2_MAX_ITERS": "8",
    "EVAL_INTERVAL_TOKENS": "256",
    "CHECKPOINT_SECONDS": "30",
    "SCHEDULE_WSD": "y",
}


@pytest.fixture
def place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path, write_stories(tmp_path_factory.mktemp("texts")), **SETTINGS)


def run(place: Workplace) -> str:
    done = train(place)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_study_tunes_judges_resumes_and_retains_its_choice(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the first run diverges in both attempts, so its rate is not eligible
    done = place.make({"place": "loss", "only": 4, "action": "nan", "times": 6})
    assert done.returncode == 0, done.stdout
    assert "2 of 2 runs pending" in done.stdout
    assert place.status("B+LR=1e-3.1000") == "failed"
    assert "learning rates chosen on tuning seed 1000: B 1e-2" in done.stdout
    runs = place.study / "runs"
    assert sorted(path.name for path in runs.iterdir()) == ["B+LR=1e-2.0", "B+LR=1e-2.1000", "B+LR=1e-3.1000"]
    assert place.plan()["learning_rates"] == {
        "rates": ["1e-3", "1e-2"],
        "tuning_seeds": 1,
        "chosen": {"B": "1e-2"},
    }
    assert "nothing to run: all 3 runs" in run(place)
    # plan.json and the record of a tuning run are lost, and an arm is added
    (place.study / "plan.json").unlink()
    (runs / "B+LR=1e-2.1000/run.json").write_text("{")
    judged = place.record("B+LR=1e-2.0")
    place.configure(**SETTINGS | {"VARIANTS": "B RALEARN"})
    assert "3 of 4 runs pending" in run(place)
    assert place.record("B+LR=1e-2.0") == judged
    plan = place.plan()
    assert plan["learning_rates"]["chosen"] == {"B": "1e-2", "RALEARN": "1e-2"}
    assert set(plan["variants"]) == {"B", "RALEARN"}
    losses = [place.numbers(f"RALEARN+LR={rate}.1000")["losses"] for rate in ("1e-2", "1e-3")]
    assert losses[0][0] == losses[1][0]  # the same weights and data
    assert losses[0][-1] != losses[1][-1]  # another rate
    assert place.status("RALEARN+LR=1e-2.0") == "finished"
    assert [row.text for row in verify_study(place.study) if row.problems] == []
    symbols = read_symbols(place.folder / ".config")
    monkeypatch.chdir(place.folder)
    with pytest.raises(ExtendError, match="longer runs can need others"):
        extend(
            Config.from_symbols(symbols),
            StudySettings.from_symbols(symbols),
            read_text(Path(".config")),
            Fraction(2),
        )
