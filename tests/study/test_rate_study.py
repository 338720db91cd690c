"""`make` with two learning rates and a very small model."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gpt2 import training_step as step
from study.verify import verify_study
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


def names(study: Path) -> list[str]:
    return sorted(path.name for path in (study / "runs").iterdir())


def status(study: Path, name: str) -> str:
    return str(json.loads((study / "runs" / name / "run.json").read_text())["status"])


def diverge(patch: pytest.MonkeyPatch, rate: float, iteration: int) -> None:
    """Let the losses of runs at this learning rate be NaN at one step."""
    plain_step, plain_loss = step.Stepper.step, step.linear_cross_entropy
    due = False

    def step_with_nan(self: step.Stepper, ids: Tensor, number: int, *rest: Any) -> step.StepResult:
        nonlocal due
        due = number == iteration and self.settings.learning_rate == rate
        return plain_step(self, ids, number, *rest)

    def loss_with_nan(*arguments: Any) -> Tensor:
        return plain_loss(*arguments) * (float("nan") if due else 1.0)

    patch.setattr(step.Stepper, "step", step_with_nan)
    patch.setattr(step, "linear_cross_entropy", loss_with_nan)


def test_a_study_tunes_judges_resumes_and_retains_its_choice(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the first run diverges in both attempts, so its rate is not eligible
    with monkeypatch.context() as patch:
        diverge(patch, 1e-3, 4)
        printed = run(place)
    assert "2 of 2 runs pending" in printed
    tuning = place.study / "rates"
    assert status(tuning, "B+LR=1e-3.1000") == "failed"
    assert "learning rates chosen on seeds 1000: 1e-2 for B" in printed
    assert names(tuning) == ["B+LR=1e-2.1000", "B+LR=1e-3.1000"]
    assert names(place.study) == ["B+LR=1e-2.0"]
    assert json.loads((tuning / "choice.json").read_text())["arms"]["B"]["rate"] == "1e-2"
    assert "nothing to run: all 1 runs" in run(place)
    # the choice and the record of a tuning run are lost, and an arm is added
    before = place.plan()
    (tuning / "choice.json").unlink()
    (tuning / "runs/B+LR=1e-2.1000/run.json").write_text("{")
    judged = place.record("B+LR=1e-2.0")
    place.configure(**SETTINGS | {"VARIANTS": "B RALEARN"})
    with pytest.MonkeyPatch.context() as patch:
        diverge(patch, 1e-3, 4)
        printed = run(place)
    assert place.record("B+LR=1e-2.0") == judged
    assert names(place.study) == ["B+LR=1e-2.0", "RALEARN+LR=1e-2.0"]
    plan = place.plan()
    assert plan["design"] == before["design"]
    assert plan["added"] == {"RALEARN+LR=1e-2": 1}
    assert {row["iterations"] for row in plan["variants"].values()} == {8}
    assert status(place.study, "RALEARN+LR=1e-2.0") == "finished"
    assert [row.text for row in verify_study(place.study) if row.problems] == []
    # other rates belong to another study
    place.configure(**SETTINGS | {"VARIANTS": "B RALEARN", "LEARNING_RATES": "1e-3 1e-2 3e-2"})
    assert "chose among 1e-3 1e-2; fix: " in train(place).stdout
