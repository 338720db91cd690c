"""The suite of scale: every arrangement is timed in every round, by processes that train together."""

from pathlib import Path

import pytest

from bench import processes
from bench.suites import executors
from study.executors.child_process import Slot
from tests.bench.sessions import run_small

SMALL = processes.TrainedShape("small", 2, 2, 16, 8, 4, 1)


@pytest.mark.usefixtures("workers_here")
def test_one_and_two_runs_at_once_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(executors, "SHAPES", {"cpu": SMALL})
    monkeypatch.setattr(executors, "local_slots", lambda count, resolved, threads: [Slot("")] * count)
    found = run_small(executors.SUITE, tmp_path, monkeypatch, rounds=2, seconds=0.01)
    assert {
        count: [len(each) for each in speeds] for count, speeds in found["slots"]["tokens_per_second"].items()
    } == {
        "1": [1, 1],
        "2": [2, 2],
    }
    assert "runs  tok/s in all" in capsys.readouterr().out
    processes.prepare.cache_clear()
