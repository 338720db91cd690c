"""The record of a run after its process ended, however it ended."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from runtime import run_record
from runtime.attempt import EXIT_SUPERSEDED
from runtime.batch_plan import BatchPlan
from runtime.dotconfig import read_symbols
from runtime.ranks import EXIT_RANK_LOST
from runtime.settings import Config
from study import dispatch, plan_file
from study.dispatch import Dispatcher
from study.executors.child_process import EXIT_OUT_OF_MEMORY
from study.executors.executor import Ended, Message, Started, Task
from study.plan_file import Plan, PlanBudget, PlanRow
from study.study import Study
from study.terminal import Estimate, Terminal
from tests.checked_files import write_checked
from tests.study.sample_records import a_record

PLAN = Plan(
    batch=BatchPlan(4, 4, 1, 1, 16),
    budget=PlanBudget(0, 0, 300),
    variants={"B": PlanRow("standard", 300, 300 * 64)},
)


class FakeExecutor:
    """Ends each task with the next status, after the process wrote a record of a status."""

    def __init__(self, study: Study, statuses: list[int], written: str | None) -> None:
        self.study, self.statuses, self.written = study, statuses, written
        self.ended: list[Message] = []
        self.micros: list[int] = []
        self.closed = 0

    def slots(self) -> int:
        return 1

    def submit(self, task: Task) -> None:
        if self.written:
            of_this = a_record("B", 0, 4.0) | {
                "status": self.written,
                "error": None,
                "notes": ["by this process"],
            }
            write_checked(task.folder / "run.json", of_this)
        words = "terminate called without an active exception"
        self.ended += [Started(task.name), Ended(task.name, self.statuses.pop(0), words)]

    def poll(self, seconds: float) -> list[Message]:
        found, self.ended = self.ended, []
        return found

    def stop(self, names: list[str]) -> None:
        pass

    def close(self) -> str:
        self.closed += 1
        return ""


def ended(study: Study, status: int, written: str | None, before: str | None = None) -> dict[str, Any]:
    """The record after a process that wrote one of status `written` ended with `status`."""
    folder = study.runs.folder("B", 0)
    folder.mkdir(parents=True, exist_ok=True)
    if before:
        write_checked(folder / "run.json", a_record("B", 0, 4.0) | {"status": before, "error": None})
    drive(study, FakeExecutor(study, [status], written))
    return run_record.load(folder).to_json()


def dispatcher(study: Study, executor: FakeExecutor) -> Dispatcher:
    return Dispatcher(
        study.runs, study.config, study.config_text, executor, study.session, study.plan_run, lambda: None
    )


def drive(study: Study, executor: FakeExecutor) -> Plan:
    return dispatcher(study, executor).execute([("B", 0)], PLAN, Terminal(Estimate(1, None), 1))


@pytest.fixture
def study(a100_config: Config) -> Study:
    return Study(read_symbols(Path(".config")), Path(".config").read_text())


@pytest.mark.parametrize("status", [-6, 1])
def test_a_finished_run_is_finished_for_any_exit_of_its_process(study: Study, status: int) -> None:
    found = ended(study, status, "finished", before="interrupted")
    assert (found["status"], found["error"]) == ("finished", None)
    assert study.runs.status("B", 0) == "finished"


@pytest.mark.parametrize("status", ["running", None])
def test_a_process_that_died_before_its_end_has_failed(study: Study, status: str | None) -> None:
    found = ended(study, -6, status, before="running")
    assert found["status"] == "failed"
    assert re.search("killed by SIGABRT: terminate called", found["error"])


def test_a_variant_with_a_result_or_a_checkpoint_protects_its_source(study: Study) -> None:
    folder = study.runs.folder("B", 0)
    folder.mkdir(parents=True)
    assert not study.has_checkpoint_or_result("B")
    write_checked(folder / "run.json", a_record("B", 0, 4.0) | {"status": "failed"})
    assert not study.has_checkpoint_or_result("B")
    (folder / "checkpoint" / "00000001").mkdir(parents=True)
    (folder / "checkpoint" / "00000001" / "meta.json").write_text("{}")
    assert study.has_checkpoint_or_result("B")
    assert not study.has_checkpoint_or_result("RALEARN")
    shutil.rmtree(folder / "checkpoint")
    write_checked(folder / "run.json", a_record("B", 0, 4.0))
    assert study.has_checkpoint_or_result("B")


def test_runs_that_ran_out_of_memory_at_once_reduce_the_micro_batch_once(study: Study) -> None:
    """Both were started at micro-batch 4. The second one is retried at the micro-batch of the first one's retry."""

    class AtOnce(FakeExecutor):
        def slots(self) -> int:
            return 2

        def submit(self, task: Task) -> None:
            super().submit(task)
            found = plan_file.read(study.directory)
            self.micros.append(found.batch.micro if found else 4)

    study.directory.mkdir(parents=True)
    executor = AtOnce(study, [EXIT_OUT_OF_MEMORY, EXIT_OUT_OF_MEMORY, 0, 0], "finished")
    driver = dispatcher(study, executor)
    plan = driver.execute([("B", 0), ("B", 1)], PLAN, Terminal(Estimate(2, None, 2), 2))
    assert executor.micros == [4, 4, 2, 2]
    assert plan.batch.micro == 2
    assert executor.closed == 1


class OfRanks(FakeExecutor):
    """The process of each submission makes `steps` steps more than the one before."""

    steps, submitted = 0, 0

    def submit(self, task: Task) -> None:
        self.submitted += 1
        line = {"event": "train", "iteration": self.steps * self.submitted, "loss": 4.0}
        (task.folder / "metrics.jsonl").write_text(f"{json.dumps(line)}\n")
        self.written = "interrupted" if self.statuses[0] else "finished"
        super().submit(task)


def with_ranks(study: Study, ranks: int) -> Study:
    study.config = dataclasses.replace(
        study.config, target=dataclasses.replace(study.config.target, ranks=ranks)
    )
    return study


@pytest.mark.parametrize(
    ("ranks", "status", "retried"),
    [(2, EXIT_RANK_LOST, True), (2, -9, True), (2, -11, False), (1, -9, False)],
)
def test_a_run_that_lost_one_of_its_ranks_is_retried(
    study: Study, ranks: int, status: int, retried: bool
) -> None:
    executor = OfRanks(study, [status, status, 0], None)
    drive(with_ranks(study, ranks), executor)
    assert executor.submitted == (3 if retried else 1)
    assert study.runs.status("B", 0) == ("finished" if retried else "failed")


def test_a_run_that_loses_a_rank_three_times_without_a_step_has_failed(study: Study) -> None:
    executor = OfRanks(study, [EXIT_RANK_LOST] * 5 + [0], None)
    drive(with_ranks(study, 2), executor)
    assert executor.submitted == dispatch.MOST_LOSSES == 3
    assert study.runs.status("B", 0) == "failed"
    executor = OfRanks(study, [EXIT_RANK_LOST] * 5 + [0], None)
    executor.steps = 1
    drive(study, executor)
    assert executor.submitted == 6
    assert study.runs.status("B", 0) == "finished"


def test_a_run_that_another_process_took_over_stays_pending(study: Study) -> None:
    """Its process wrote nothing, and neither does the driver."""
    write_checked(study.runs.folder("B", 0) / "run.json", a_record("B", 0, 4.0) | {"status": "running"})
    before = dispatch.record_text(study.runs.folder("B", 0))
    drive(study, FakeExecutor(study, [EXIT_SUPERSEDED], None))
    assert dispatch.record_text(study.runs.folder("B", 0)) == before
    assert ("B", 0) in study.runs.pending()
