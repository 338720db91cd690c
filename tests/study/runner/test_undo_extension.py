"""An extension can be undone: every file of before is restored, and nothing of the longer runs is lost."""

import contextlib
import dataclasses
import json
import os
import shutil
from copy import copy as copies
from pathlib import Path
from typing import Any

import pytest

from gpt2.artifacts import run_record
from gpt2.system import files
from gpt2.system.signals import Interrupted
from study.report import build
from study.runner.extend import ExtendError, finish_extension, undo
from study.runner.preconditions import StudyError, locked
from tests.small_runs import StopAfter, same
from tests.study.extended import FIRST, Place, contents, outcome

pytestmark = pytest.mark.usefixtures("one_thread")


def study_of(finished: Place) -> dict[str, bytes]:
    """Every file of the study except those of undone extensions, and memory.json, which holds measurements."""
    return {
        name: content
        for name, content in contents(finished.directory).items()
        if not name.startswith("undone-") and not name.endswith("memory.json")
    }


@pytest.mark.parametrize("continued", [(), ("B",), ("B", "RALEARN")])
def test_undoing_an_extension_restores_every_byte(finished: Place, continued: tuple[str, ...]) -> None:
    before = study_of(finished)
    finished.extend()
    for name in continued:
        finished.run(name)
    messages = undo(finished.settings)
    assert study_of(finished) == before
    assert f"iterations: {FIRST}" in messages[0]
    assert (finished.directory / f"undone-{2 * FIRST}").exists() == bool(continued)


def test_the_longer_results_of_an_undone_extension_are_a_study_folder_of_their_own(finished: Place) -> None:
    finished.extend()
    finished.run("B")
    finished.run("RALEARN")
    longer = [outcome(finished.folder(name)) for name in ("B", "RALEARN")]
    message = undo(finished.settings)[-1]
    place = finished.directory / f"undone-{2 * FIRST}"
    assert f"make report STUDY={place}" in message
    assert same([outcome(place / "runs" / name) for name in ("B0", "RALEARN0")], longer)
    report = build.build_report(place)
    assert [(run.name, run.used) for run in report.runs] == [("B0", True), ("RALEARN0", True)]
    assert report.budget["max_iterations"] == 2 * FIRST


def test_a_restored_study_can_be_extended_to_the_same_bits(finished: Place) -> None:
    finished.extend()
    finished.run("B")
    before = outcome(finished.folder("B"))
    undo(finished.settings)
    finished.extend()
    finished.run("B")
    assert same(outcome(finished.folder("B")), before)
    undo(finished.settings)
    assert (finished.directory / f"undone-{2 * FIRST}.2").is_dir()


def test_extensions_are_undone_one_at_a_time_and_last_first(finished: Place) -> None:
    states = [study_of(finished)]
    for _ in range(2):
        finished.extend()
        finished.run("B")
        finished.run("RALEARN")
        states.append(study_of(finished))
    for count in (20, 10):
        undo(finished.settings)
        states.pop()
        assert study_of(finished) == states[-1]
        assert {run_record.load(finished.folder(name)).schedule.iterations for name in ("B", "RALEARN")} == {
            count
        }
    with pytest.raises(ExtendError, match="has not been extended"):
        undo(finished.settings)
    assert study_of(finished) == states[-1]


def test_a_run_that_was_started_after_the_extension_moves_with_the_longer_results(finished: Place) -> None:
    finished.extend()
    started = finished.directory / "runs" / "B1"
    record = run_record.load(finished.folder("B"))
    schedule = {"iterations": 2 * FIRST, "cut": False}
    started.mkdir()
    files.write_json(started / "run.json", record.to_json() | {"run": "B1", "seed": 1, "schedule": schedule})
    undo(finished.settings)
    assert not started.exists()
    assert (finished.directory / f"undone-{2 * FIRST}" / "runs" / "B1" / "run.json").exists()


def test_an_extension_is_not_undone_while_the_study_is_running(finished: Place) -> None:
    finished.extend()
    before = contents(finished.directory)
    with locked(finished.directory), pytest.raises(StudyError, match="is being run"):
        undo(finished.settings)
    assert contents(finished.directory) == before


def test_undoing_can_be_interrupted_at_every_step_and_completed(
    finished: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write, removal, renaming and replacement is a step. B continued beyond the old length, RALEARN did not."""
    before = study_of(finished)
    finished.extend()
    finished.run("B", StopAfter(9))

    def copy(number: int) -> Place:
        made = copies(finished)
        made.settings = dataclasses.replace(finished.settings, results_dir=tmp_path / f"copy{number}")
        made.directory = tmp_path / f"copy{number}" / "s"
        shutil.copytree(finished.directory, made.directory)
        return made

    whole = copy(0)
    undo(whole.settings)
    assert study_of(whole) == before
    for cut_at in range(1, 100):
        place, steps = copy(cut_at), []

        def counted(function: Any, steps: list[str] = steps, cut_at: int = cut_at) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                steps.append(function.__name__)
                if len(steps) == cut_at:
                    raise Interrupted("SIGKILL")
                return function(*arguments, **named)

            return call

        with monkeypatch.context() as patch, contextlib.suppress(Interrupted):
            patch.setattr(files, "write_text", counted(files.write_text))
            patch.setattr(shutil, "copyfile", counted(shutil.copyfile))
            patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
            for name in ("unlink", "rename", "replace", "mkdir", "touch"):
                patch.setattr(Path, name, counted(getattr(Path, name)))
            undo(place.settings)
            break
        if (place.directory / "undo.json").exists():
            finish_extension(place.directory)
        elif (place.directory / f"plan-{FIRST}.json").exists():  # interrupted before the first change
            undo(place.settings)
        assert contents(place.directory) == contents(whole.directory)
        shutil.rmtree(place.directory)
    assert cut_at > 15


def test_the_report_is_older_than_the_restored_records(finished: Place) -> None:
    finished.extend()
    finished.run("B")
    report = finished.directory / "report.json"
    report.write_text("{}")
    os.utime(report, ns=(0, (finished.folder("B") / "run.json").stat().st_mtime_ns))
    undo(finished.settings)
    assert (finished.folder("B") / "run.json").stat().st_mtime_ns >= report.stat().st_mtime_ns


def test_the_commands_say_which_one_is_right(finished: Place) -> None:
    (finished.directory / "undo.json").write_text(
        json.dumps({"previous": "plan-10.json", "into": "undone-20"})
    )
    assert "make extend UNDO=1" in finished.refusal()
