"""Runs of two ranks under every command of numerics: record, bisect, repeat, monitor and trend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from referee.numerics import NumericsError
from referee.numerics.repeat.repeat_evidence import repeat_step
from runtime import run_record
from scripts import bisect as bisect_command
from scripts import monitor as monitor_command
from scripts import record as record_command
from scripts import trend as trend_command
from study.evaluation.loaded_runs import open_run
from tests.scripts.faulty_runs import HALF, ROOT, configured, train, workplace

pytestmark = pytest.mark.slow
STEPS = 16
MONITORED = {"GPT2_MAX_ITERS": str(STEPS), "EFFECTIVE_BATCH": "8", "MONITOR": "y", "MONITOR_INTERVAL": "1"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder with the runs: one/B0 of a process, two/B0 of two ranks, lost/B0 and half/HALF0 with a fault."""
    with workplace(tmp_path_factory.mktemp("place"), half=HALF) as folder:
        train("B", "one", **MONITORED)
        ranks = MONITORED | {"RANKS": "2"}
        specs = [
            {"world": 2, "arm": "B", "run": str(configured("B", "two", **ranks))},
            {"world": 2, "arm": "B", "run": str(configured("B", "lost", **ranks)), "fault": "lost"},
            {"world": 2, "arm": "HALF", "run": str(configured("HALF", "half", **ranks))},
        ]
        command = [sys.executable, "-m", "tests.scripts.rank_training", json.dumps(specs)]
        subprocess.run(command, check=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)})
        yield folder


def call(command: Any, monkeypatch: pytest.MonkeyPatch, *words: str, **given: Any) -> int:
    options = [f"--{name}={value}" for name, value in given.items()]
    monkeypatch.setattr("sys.argv", [command.__name__, *options, *words])
    status: int = command.main()
    return status


def run(study: str, name: str = "B0") -> Path:
    return Path(f"results/{study}/runs/{name}")


def test_a_step_of_two_ranks_is_recorded_exactly(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(record_command, monkeypatch, run=run("two"), step=12) == 0
    assert "exact: 12 of 12 replayed steps equal metrics.jsonl in loss and gradient norm, to the bit" in (
        capsys.readouterr().out
    )


def reductions(folder: str) -> list[str]:
    """Return the tensors whose reduction is neither the sum nor the mean of the ranks."""
    rows = json.loads(Path(folder, "trend.json").read_text())["rows"]
    return [
        row["call"] for row in rows if row["side"] == "mean" and row["golden"].startswith(("sum", "mean"))
    ]


def test_the_module_with_a_fault_is_named_in_a_run_of_two_ranks(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(bisect_command, monkeypatch, run=run("half", "HALF0")) == 0
    found = json.loads(Path("results/half/bisect/HALF0/bisect.json").read_text())
    assert found["found"] == ["upcast:blocks.1.attention"]


def test_a_wrong_exchange_is_not_in_a_replay(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NumericsError, match="does not show the symptom differs"):
        call(bisect_command, monkeypatch, run=run("lost"), against=run("one"))
    assert call(trend_command, monkeypatch, str(run("one")), str(run("lost"))) == 0
    assert reductions("results/trend-one-runs-B0-lost-runs-B0")


def test_trend_has_the_rows_of_both_ranks_and_no_finding(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monitor_command, monkeypatch, run=run("two")) == 0
    printed = capsys.readouterr().out
    for rank in range(2):
        assert f"rank {rank}: grad_unreduced: 28 tensors, {STEPS} steps from 1 to {STEPS}" in printed
    assert call(trend_command, monkeypatch, str(run("one")), str(run("two"))) == 0
    assert reductions("results/trend-one-runs-B0-two-runs-B0") == []


def test_repeat_replays_both_ranks(place: Path) -> None:
    replay = open_run(run("two"), run_record.load(run("two")), 3)
    steps = replay.steps()
    steps.advance()
    found = repeat_step(steps, times=2, threads=1)
    assert (replay.differences, replay.checked) == ([], 3)
    assert not found.is_fault, found.rows()
