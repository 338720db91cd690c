"""Several runs at once on this machine: the numbers are those of one run at a time."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpt2.trainer import TrainingRun
from ra.variants import variant
from runtime.batch_plan import plan_batch
from runtime.dotconfig import read_symbols
from runtime.resolved_target import resolve
from runtime.settings import Config, load_config
from runtime.signals import Stop
from study import plan_file, worker
from study.executors.child_process import EXIT_FINISHED, cores
from study.executors.executor import LocalExecutor, Message
from study.plan_file import Plan, PlanBudget
from study.status_table import status_text
from study.study import Study
from study.terminal import beside_note
from study.worker import run_plan
from tests.busy_machine import other_work
from tests.faults.in_process import InProcessExecutor
from tests.faults.workplace import Workplace, injected, write_stories
from tests.small_runs import ALTERNATION

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
    monkeypatch.setattr(Study, "inspect_attention", lambda study: None)
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


def train_alone(study_dir: Path, name: str, config: Config) -> None:
    """Make a run of the study's plan in this process."""
    chosen = variant("B", config.model, ALTERNATION)
    plan = run_plan(study_dir, "B", int(name[1:]))
    run = TrainingRun(
        plan, chosen.configure(config), resolve(config.target), chosen.parts, Stop(), shared=config
    )
    assert run.train() == "finished"


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
    plan = Plan(batch=plan_batch(4, 2, 1, 16), budget=PlanBudget(0, 0, 20), variants={}, threads=7)
    two.study.mkdir(parents=True)
    plan_file.write(two.study, plan)
    given = Path(".config").read_text()
    text = given.replace("CPU_THREADS=1", "CPU_THREADS=0")
    for content, threads in ((given, 1), (text, 7)):
        Path(".config").write_text(content)
        assert Study(read_symbols(Path(".config")), content).config.target.cpu_threads == threads
    (two.study / "config").write_text(text)
    asked: list[int] = []
    monkeypatch.setattr(worker, "resolve", lambda target: asked.append(target.cpu_threads))
    monkeypatch.setattr(sys, "argv", ["scripts.train", str(two.study), "B", "0", "--resolve"])
    monkeypatch.setattr(Stop, "install", lambda stop, parent=0: stop)
    assert worker.main() == EXIT_FINISHED
    assert asked == [7]


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
    for name in RUNS:
        two.run_dir(name).rename(tmp_path / name)
        train_alone(two.study, name, load_config(".config"))
    assert together == [two.numbers(name) for name in RUNS]
