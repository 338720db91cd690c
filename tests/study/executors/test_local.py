"""Several runs at once on this machine: the numbers are those of one run at a time."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.batch_plan import plan_batch
from runtime.dotconfig import read_symbols
from runtime.signals import Stop
from study import plan_file, worker
from study.executors.child_process import EXIT_FAILED, EXIT_FINISHED, cores
from study.executors.executor import LocalExecutor, Message
from study.plan_file import Plan, PlanBudget, PlanRow
from study.status_table import status_text
from study.study import Study
from study.terminal import beside_note
from tests.busy_machine import other_work
from tests.faults.in_process import InProcessExecutor
from tests.faults.workplace import Workplace, injected, write_stories

pytestmark = pytest.mark.slow
RUNS = ("B0", "B1")


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """Return a study of two runs at once, which is driven in this process. The variant is not examined."""
    texts = write_stories(tmp_path / "texts")
    place = Workplace(tmp_path / "two", texts, SLOTS="2", SEEDS="2", GPT2_MAX_ITERS="20")
    monkeypatch.chdir(place.folder)
    for name, value in place.environment(TORCHINDUCTOR_AUTOGRAD_CACHE="0").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Study, "admit", lambda study: None)
    return place


def make(monkeypatch: pytest.MonkeyPatch, during: Any = None) -> int:
    """Run `make` in this process. during: called after each look at the runs."""
    plain = LocalExecutor.poll

    def poll(executor: LocalExecutor, seconds: float) -> Sequence[Message]:
        found = plain(executor, 0.1)
        if during:
            during()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(LocalExecutor, "poll", poll)
        return Study(read_symbols(Path(".config")), Path(".config").read_text()).run()


def train_by_hand(plan: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Train the run of a plan in a folder that has nothing else. Returns the exit status."""
    run_dir.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(plan, run_dir / "plan.json")
    monkeypatch.setattr(sys, "argv", ["scripts.train", str(run_dir / "plan.json")])
    monkeypatch.setattr(Stop, "install", lambda stop, parent=0: stop)
    return worker.main()


def test_counts_and_losses_are_equal_idle_and_beside_other_work_on_one_core(
    two: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads or counts that follow the machine make another experiment of every start."""
    two.configure(CPU_THREADS="0", SEEDS="2", GPT2_MAX_ITERS="20")
    found, at_once, here = [], [], os.sched_getaffinity(0)
    for cpus, processes in ((here, 0), ({min(here)}, 2)):
        os.sched_setaffinity(0, cpus)
        try:
            with other_work(processes):
                assert make(monkeypatch) == 0
        finally:
            os.sched_setaffinity(0, here)
        found.append([two.numbers(name) for name in RUNS])
        at_once.append(two.plan()["slots"])
        assert two.plan()["threads"] == 1
        two.study.rename(tmp_path / f"beside {processes}")
    assert found[0] == found[1]
    assert at_once == [len(cores()), 1]


def test_a_study_keeps_its_threads_on_a_machine_with_more_cores(
    two: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers depend on them, in the driver's checks and in each training process. A set number counts."""
    rows = {"B": PlanRow("standard", 20, 1280)}
    plan = Plan(batch=plan_batch(4, 2, 1, 16), budget=PlanBudget(0, 0, 20), variants=rows, threads=7)
    two.study.mkdir(parents=True)
    plan_file.write(two.study, plan)
    given = Path(".config").read_text()
    for content, threads in ((given, 1), (given.replace("CPU_THREADS=1", "CPU_THREADS=0"), 7)):
        Path(".config").write_text(content)
        study = Study(read_symbols(Path(".config")), content)
        assert study.config.target.cpu_threads == threads
        assert study.plan_run(plan, "B", 0).settings == study.config


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.usefixtures("one_thread")
def test_two_slots_have_the_numbers_of_one_to_the_bit(
    two: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The study with two slots is interrupted while both train. Both save, and the next `make` continues them here."""
    seen: list[str] = []

    def interrupt() -> None:
        if not seen and min(map(two.steps, RUNS)) > 8:
            seen.extend(status_text(two.study).splitlines())
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        for name, value in injected(None, slower=0.3).items():
            patch.setenv(name, value)
        assert make(monkeypatch, interrupt) == 130
    rows = [line.split() for line in seen[2:4]]
    assert [row[:2] for row in rows] == [["B0", "running"], ["B1", "running"]]
    assert [row[-2:] for row in rows] == [["slot", "0"], ["slot", "1"]]
    assert not two.orphans()
    assert [two.status(name) for name in RUNS] == ["interrupted"] * 2
    assert capfd.readouterr().out.count("stopped, saved") == 2
    monkeypatch.setattr(InProcessExecutor, "slots", lambda executor: 2)
    monkeypatch.setattr(Study, "executor", lambda study: InProcessExecutor())
    assert make(monkeypatch) == 0
    assert "2 of 2 runs pending, 2 at once" in capfd.readouterr().out
    assert "all runs are finished" in status_text(two.study)
    assert beside_note(2) in json.loads((two.study / "report.json").read_text())["notes"]
    together = [two.numbers(name) for name in RUNS]
    study = two.study.rename(tmp_path / "study")
    Path(".config").unlink()
    for name in RUNS:
        assert (
            train_by_hand(study / f"runs/{name}/plan.json", two.run_dir(name), monkeypatch) == EXIT_FINISHED
        )
    assert together == [two.numbers(name) for name in RUNS]
    capfd.readouterr()
    plan = study / "runs/B0/plan.json"
    plan.write_text(plan.read_text().replace('"seed": 0', '"seed": 7'))
    assert train_by_hand(plan, tmp_path / "altered", monkeypatch) == EXIT_FAILED
    assert f"error: {tmp_path / 'altered/plan.json'} was altered" in capfd.readouterr().err
