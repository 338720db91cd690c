"""The suite of the recorder: every mode is timed in every round, and unequal numbers are reported."""

import dataclasses
from pathlib import Path

import pytest

from bench.observed_step import ObservationMode, ObservedShape, ObservedStep
from bench.suites.recorder import OBSERVED
from gpt2.train.step import StepResult
from tests.bench.sessions import run_small

SMALL = ObservedShape("small", 2, 2, 16, 8, 2)


@pytest.mark.usefixtures("workers_here")
def test_every_mode_is_timed_in_every_round_and_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = dataclasses.replace(OBSERVED, shapes=(SMALL,)).suite()
    result = run_small(small, tmp_path, monkeypatch, rounds=2)["shapes"][0]
    names = [mode.name for mode in (OBSERVED.plain, *OBSERVED.modes)]
    assert [sample["case"] for sample in result["samples"]] == names * 2
    assert all(sample["wall"] > 0 for sample in result["samples"])
    assert result["differing"] == []
    printed = capsys.readouterr().out
    assert "one optimizer step of small, one thread" in printed
    assert printed.count("equal") == len(OBSERVED.modes)


def test_a_recorder_that_changes_a_number_is_named(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    step = ObservedStep(SMALL)
    unchanged = ObservedStep.run

    def changed(self: ObservedStep, mode: ObservationMode) -> tuple[StepResult, float, float]:
        result, wall, cpu = unchanged(self, mode)
        if mode.name == "mix, statistics":
            self.stepper.model.head.data.view(-1)[3] += 1e-6
        return result, wall, cpu

    monkeypatch.setattr(ObservedStep, "run", changed)
    assert step.differing(OBSERVED.plain, OBSERVED.modes) == ["mix, statistics"]


def test_a_ratio_is_taken_within_a_round() -> None:
    samples = [
        {"case": case, "wall": wall, "cpu": wall}
        for case, wall in (
            ("not recorded", 1.0),
            ("L0, hash", 2.0),
            ("not recorded", 10.0),
            ("L0, hash", 11.0),
        )
    ]
    assert OBSERVED.costs(samples, OBSERVED.modes[1], "wall") == [2.0, 1.1]
