"""The suite of the monitor: every mode is timed in every round, and unequal numbers are reported."""

import dataclasses
from pathlib import Path

import pytest

from bench.observed_step import ObservationMode, ObservedShape, ObservedStep
from bench.suites.monitor import OBSERVED
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
    assert capsys.readouterr().out.count("equal") == len(OBSERVED.modes)


def test_a_monitor_that_changes_a_number_is_named(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    step = ObservedStep(SMALL)
    unchanged = ObservedStep.run

    def changed(self: ObservedStep, mode: ObservationMode) -> tuple[StepResult, float, float]:
        result, wall, cpu = unchanged(self, mode)
        if mode.name == "attention, every step":
            self.stepper.model.head.data.view(-1)[3] += 1e-6
        return result, wall, cpu

    monkeypatch.setattr(ObservedStep, "run", changed)
    assert step.differing(OBSERVED.plain, OBSERVED.modes) == ["attention, every step"]


def test_the_cost_is_taken_within_a_round_and_divided_among_the_steps() -> None:
    mode = OBSERVED.modes[0]  # every 10 steps
    samples = [
        {"case": case, "wall": wall, "cpu": wall}
        for case, wall in (
            ("not monitored", 1.0),
            (mode.name, 2.0),
            ("not monitored", 10.0),
            (mode.name, 15.0),
        )
    ]
    assert OBSERVED.costs(samples, mode, "wall") == pytest.approx([0.1, 0.05])
