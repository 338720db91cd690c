"""CONFIG_CONTINUES: the same bits as a run that was so long from the start, and a shorter study that never changes."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import checkpoint, run_record
from runtime.errors import UserError
from runtime.run_plan import Start
from runtime.signals import Stop
from study import plan_file
from study.amend_plan import check_starts
from tests import small_runs
from tests.faults.in_process import train
from tests.faults.workplace import STUDY, Workplace, write_stories
from tests.small_runs import StopAfter, outcome, same

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclasses.dataclass
class Trial:
    """Runs of one variant, dropout and decay."""

    texts: Path
    name: str = "RALEARN"
    dropout: float = 0.0
    decay: float = 0.3

    def run(self, folder: Path, count: int, shorter: Path | None = None, stop: Stop | None = None) -> str:
        """Train or resume a run of `count` iterations, which continues `shorter`."""
        schedule = ("wsd", self.decay)
        config = small_runs.configuration(self.texts, count, dropout=self.dropout, schedule=schedule)
        start = None
        if shorter:
            record = run_record.load(shorter)
            assert record.schedule
            start = Start(shorter, record.schedule.iterations, record.fingerprint.schedule)
        return small_runs.start(folder, config, self.name, stop, warmup_iterations=2, start=start).train()


def numbers(folder: Path) -> Any:
    """What must agree to the last bit: all but the fingerprint, which names the start."""
    state, record, losses = outcome(folder)
    return state, {name: value for name, value in record.items() if name != "fingerprint"}, losses


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    ("name", "counts", "decay", "dropout"),
    [("B", (10, 20), 0.3, 0.0), ("RALEARN", (10, 15, 30), 0.5, 0.2), ("B", (9, 21), 0.7, 0.2)],
)
def test_a_continued_run_is_the_run_that_was_so_long_from_the_start(
    tmp_path: Path, texts: Path, name: str, counts: tuple[int, ...], decay: float, dropout: float
) -> None:
    trial, shorter = Trial(texts, name, dropout, decay), None
    for count in counts:
        folder = tmp_path / f"{count}"
        before = contents(shorter) if shorter else {}
        assert trial.run(folder, count, shorter) == "finished"
        assert not shorter or contents(shorter) == before
        shorter = folder
    assert trial.run(tmp_path / "whole", counts[-1]) == "finished"
    assert len(numbers(folder)[2]) == counts[-1]
    assert same(numbers(folder), numbers(tmp_path / "whole"))
    continued, whole = (run_record.load(path).fingerprint for path in (folder, tmp_path / "whole"))
    assert continued.schedule != whole.schedule
    assert continued.replace(schedule="") == whole.replace(schedule="")


def test_a_continued_run_that_is_killed_again_and_again_goes_on_to_the_same_bits(
    tmp_path: Path, texts: Path
) -> None:
    trial = Trial(texts)
    assert trial.run(tmp_path / "short", 10) == "finished"
    assert trial.run(tmp_path / "whole", 20) == "finished"
    for first in (1, 6):
        folder, looks = tmp_path / f"{first}", first
        while trial.run(folder, 20, tmp_path / "short", StopAfter(looks)) == "interrupted":
            looks += 3
        assert same(numbers(folder), numbers(tmp_path / "whole"))


def test_a_state_of_other_settings_is_not_continued(tmp_path: Path, texts: Path) -> None:
    Trial(texts).run(tmp_path / "short", 10)
    (state,) = checkpoint.complete(tmp_path / "short" / "stable")
    assert state.name == f"{7:08d}"
    with pytest.raises(RuntimeError, match=r"batch|model|another"):
        Trial(texts, dropout=0.2).run(tmp_path / "long", 20, tmp_path / "short")


SETTINGS = {
    "VARIANTS": "B RALEARN", "SCHEDULE_WSD": "y", "WARMUP_FRACTION": "0.25", "GPT2_MAX_ITERS": "12",
    "EVAL_INTERVAL_TOKENS": "256",
}  # fmt: skip
LONG = {"STUDY_NAME": "long", "CONTINUES": f"results/{STUDY}", "GPT2_MAX_ITERS": "24"}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Return a place with a finished study of 12 iterations."""
    folder = tmp_path_factory.mktemp("continued")
    place = Workplace(folder, write_stories(folder / "texts"), **SETTINGS)
    done = train(place)
    assert done.returncode == 0, done.stdout
    return place


def test_a_study_continues_another_one_and_shows_its_verdict(short: Workplace) -> None:
    before = contents(short.study)
    short.configure(**SETTINGS | LONG)
    done = train(short)
    assert done.returncode == 0, done.stdout
    assert contents(short.study) == before
    folder = short.study.parent / "long"
    plan = plan_file.read(folder)
    assert plan.continues.iterations == {"B": 12, "RALEARN": 12}
    assert {(row.iterations, row.warmup_iterations) for row in plan.variants.values()} == {(24, 3)}
    (verdict,) = plan.continues.verdicts
    for name in ("report.md", "report.html", "report.json"):
        page = (folder / name).read_text()
        assert f"results/{STUDY}" in page
        assert verdict.partition(" (perplexity")[0] in page
    assert "nothing to run" in train(short).stdout


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"LEARNING_RATE": "2e-3"}, "CONFIG_LEARNING_RATE: "),
        ({"GPT2_MAX_ITERS": "12"}, "B is planned for 12 iterations"),
        ({"SEEDS": "2"}, "runs/B1/run.json does not exist"),
        ({"VARIANTS": "B GATED"}, "runs/GATED0/run.json does not exist"),
        ({"CONTINUES": "results/none"}, "results/none has no plan.json"),
    ],
)
def test_what_cannot_be_continued_is_refused_in_one_line_before_anything_trains(
    short: Workplace, changes: dict[str, str], names: str
) -> None:
    name = f"refused-{'-'.join(changes)}"
    short.configure(**SETTINGS | LONG | {"STUDY_NAME": name} | changes)
    done = train(short)
    assert done.returncode == 1
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("error: "))
    assert names in line
    assert "fix: " in line
    assert not (short.study.parent / name / "runs").exists()


def change_source(study: Path) -> None:
    """Make the run one of a variant whose source was another one."""
    (study / "own").mkdir()
    (study / "own/mine.py").write_text("x = 2\n")
    record = run_record.load(study / "runs/B0")
    run_record.write(study / "runs/B0", record.replace(variant="B+MLP=mine"))


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (
            lambda study: (study / "config").write_text("CONFIG_SCHEDULE_COSINE=y\n"),
            "only WSD can be continued",
        ),
        (lambda study: shutil.rmtree(study / "runs/B0/stable"), "runs/B0/stable has no checkpoint"),
        (
            lambda study: next(study.glob("runs/B0/stable/*/state.pt")).write_bytes(b""),
            "state.pt: SHA-256 is",
        ),
        (change_source, "mine.py differs from "),
        (lambda study: (study / "runs/B0/metrics.jsonl").write_text(""), "runs/B0 is damaged: metrics.jsonl"),
    ],
)
def test_a_study_without_the_states_is_refused(
    short: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], object],
    names: str,
) -> None:
    study = shutil.copytree(short.study, tmp_path / "study")
    monkeypatch.setattr("ra.arms.CUSTOM_FOLDER", tmp_path)
    (tmp_path / "mine.py").write_text("x = 1\n")
    text = (study / "config").read_text()
    check_starts(study, text, [("B", 0)])
    damage(study)
    with pytest.raises(UserError, match=rf"^CONFIG_CONTINUES.*{names}.*; fix: "):
        check_starts(study, text, [("B", 0)])
