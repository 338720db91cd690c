"""The suite of the monitor: every mode is timed in every round, and unequal numbers are reported."""

from pathlib import Path

import pytest

from bench.suites.monitor import measure as monitor
from gpt2.train.step import StepResult
from tests.bench.sessions import run_small

SMALL = monitor.ObservedShape("small", 2, 2, 16, 8, 2)


@pytest.mark.usefixtures("workers_here")
def test_every_mode_is_timed_in_every_round_and_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(monitor, "SHAPES", (SMALL,))
    result = run_small(monitor.SUITE, tmp_path, monkeypatch, rounds=2)["shapes"][0]
    names = [monitor.PLAIN, *(mode.name for mode in monitor.MODES)]
    assert [sample["case"] for sample in result["samples"]] == names * 2
    assert all(sample["wall"] > 0 for sample in result["samples"])
    assert result["differing"] == []
    assert capsys.readouterr().out.count("equal") == len(monitor.MODES)


def test_a_monitor_that_changes_a_number_is_named(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    step = monitor.MonitoredStep(SMALL)
    unchanged = monitor.MonitoredStep.run

    def changed(
        self: monitor.MonitoredStep, mode: monitor.MonitorMode | None
    ) -> tuple[StepResult, float, float]:
        result, wall, cpu = unchanged(self, mode)
        if mode and mode.targets == ("attention",):
            self.stepper.model.head.data.view(-1)[3] += 1e-6
        return result, wall, cpu

    monkeypatch.setattr(monitor.MonitoredStep, "run", changed)
    assert step.differing(monitor.MODES) == ["attention, every step"]


def test_the_cost_is_taken_within_a_round_and_divided_among_the_steps() -> None:
    mode = monitor.MonitorMode("x", ("grad",), 10)
    samples = [
        {"case": case, "wall": wall, "cpu": wall}
        for case, wall in ((monitor.PLAIN, 1.0), ("x", 2.0), (monitor.PLAIN, 10.0), ("x", 15.0))
    ]
    assert monitor.costs(samples, mode, "wall") == pytest.approx([0.1, 0.05])
