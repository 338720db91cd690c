"""The suite of the recorder: every mode is timed in every round, and unequal numbers are reported."""

from pathlib import Path

import pytest

from bench.suites import recorder
from gpt2.train.step import StepResult
from tests.bench.sessions import run_small

SMALL = recorder.ObservedShape("small", 2, 2, 16, 8, 2)


@pytest.mark.usefixtures("workers_here")
def test_every_mode_is_timed_in_every_round_and_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorder, "SHAPES", (SMALL,))
    result = run_small(recorder.SUITE, tmp_path, monkeypatch, rounds=2)["shapes"][0]
    names = [recorder.PLAIN, *(mode.name for mode in recorder.MODES)]
    assert [sample["case"] for sample in result["samples"]] == names * 2
    assert all(sample["wall"] > 0 for sample in result["samples"])
    assert result["differing"] == []
    printed = capsys.readouterr().out
    assert "one optimizer step of small, one thread" in printed
    assert printed.count("equal") == len(recorder.MODES)


def test_a_recorder_that_changes_a_number_is_named(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    step = recorder.RecorderStep(SMALL)
    unchanged = recorder.RecorderStep.run

    def changed(
        self: recorder.RecorderStep, mode: recorder.RecorderMode | None
    ) -> tuple[StepResult, float, float]:
        result, wall, cpu = unchanged(self, mode)
        if mode and mode.level == "mix":
            self.stepper.model.head.data.view(-1)[3] += 1e-6
        return result, wall, cpu

    monkeypatch.setattr(recorder.RecorderStep, "run", changed)
    assert step.differing(recorder.MODES) == ["mix, statistics"]


def test_a_ratio_is_taken_within_a_round() -> None:
    samples = [
        {"case": case, "wall": wall, "cpu": wall}
        for case, wall in ((recorder.PLAIN, 1.0), ("x", 2.0), (recorder.PLAIN, 10.0), ("x", 11.0))
    ]
    assert recorder.ratios(samples, "x", "wall") == [2.0, 1.1]
