"""The record of a run after its process ended, however it ended."""

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpt2.artifacts import run_record
from gpt2.config.batch import BatchPlan
from gpt2.config.config import Config
from gpt2.config.dotconfig import read_symbols
from gpt2.system import files
from study.executors.child_process import Event, Session
from study.records.plan_file import Plan, PlanBudget, PlanRow
from study.runner.study import Study
from study.runner.terminal import Estimate, Terminal
from tests.study.sample_records import a_record

PLAN = Plan(
    batch=BatchPlan(4, 4, 1, 1, 16),
    budget=PlanBudget(0, 0, 300),
    variants={"B": PlanRow("standard", 300, 300 * 64)},
)


class Child:
    """A process that writes its record and ends with a status."""

    def __init__(self, folder: Path, written: dict[str, Any] | None, status: int) -> None:
        self.folder, self.written, self.status = folder, written, status
        self.log = folder / "log.txt"

    def events(self) -> Iterator[Event]:
        if self.written:
            files.write_json(self.folder / "run.json", self.written)
        yield from ()

    def wait(self) -> int:
        return self.status

    def last_words(self) -> str:
        return "terminate called without an active exception"


def ended(study: Study, status: int, written: str | None, before: str | None = None) -> dict[str, Any]:
    """The record after a process that wrote one of status `written` ended with `status`."""
    folder = study.runs.folder("B", 0)
    folder.mkdir(parents=True, exist_ok=True)
    record = a_record("B", 0, 4.0)
    if before:
        files.write_json(folder / "run.json", record | {"status": before, "error": None})

    class Fake(Session):
        @contextlib.contextmanager
        def process(self, arguments: list[str], log: Path) -> Iterator[Any]:
            of_this = record | {"status": written, "error": None, "notes": ["by this process"]}
            yield Child(folder, of_this if written else None, status)

    study.session = Fake()
    study.execute_run(("B", 0), PLAN, Terminal(Estimate(1, None), 1))
    return run_record.load(folder).to_json()


@pytest.fixture
def study(a100_config: Config) -> Study:
    return Study(read_symbols(Path(".config")), Path(".config").read_text())


@pytest.mark.parametrize("status", [-6, -11, 120, 1])
def test_a_finished_run_is_finished_for_any_exit_of_its_process(study: Study, status: int) -> None:
    found = ended(study, status, "finished", before="interrupted")
    assert (found["status"], found["error"]) == ("finished", None)
    assert study.runs.status("B", 0) == "finished"


@pytest.mark.parametrize("status", ["running", "interrupted", None])
def test_a_process_that_died_before_its_end_has_failed(study: Study, status: str | None) -> None:
    found = ended(study, -6, status, before="running")
    assert found["status"] == "failed"
    assert re.search("killed by SIGABRT: terminate called", found["error"])


def test_a_record_older_than_the_process_does_not_show_its_end(study: Study) -> None:
    assert ended(study, -6, None, before="finished")["status"] == "failed"


def test_a_variant_with_a_result_or_a_checkpoint_protects_its_source(study: Study) -> None:
    folder = study.runs.folder("B", 0)
    folder.mkdir(parents=True)
    assert not study.has_checkpoint_or_result("B")
    files.write_json(folder / "run.json", a_record("B", 0, 4.0) | {"status": "failed"})
    assert not study.has_checkpoint_or_result("B")
    (folder / "checkpoint" / "00000001").mkdir(parents=True)
    (folder / "checkpoint" / "00000001" / "meta.json").write_text("{}")
    assert study.has_checkpoint_or_result("B")
    assert not study.has_checkpoint_or_result("RALEARN")
    shutil.rmtree(folder / "checkpoint")
    files.write_json(folder / "run.json", a_record("B", 0, 4.0))
    assert study.has_checkpoint_or_result("B")
