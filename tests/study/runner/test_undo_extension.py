"""An extension can be undone: every file of before is restored, and nothing of the longer runs is lost."""

import json
from pathlib import Path

import pytest

from gpt2.artifacts import run_record
from gpt2.system import files
from gpt2.system.errors import UserError
from study.attention.data import InputText, write_study
from study.report import build, write
from study.runner.extend import finish_extension, undo
from study.runner.preconditions import locked
from tests.small_runs import StopAfter, same
from tests.study.extended import FIRST, Place, contents, interrupt_at_every_step, outcome

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
    assert report.budget is not None
    assert report.budget.max_iterations == 2 * FIRST


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
    with pytest.raises(UserError, match="has not been extended"):
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
    with locked(finished.directory), pytest.raises(UserError, match="is being run"):
        undo(finished.settings)
    assert contents(finished.directory) == before


def test_undoing_can_be_interrupted_at_every_step_and_completed(finished: Place, tmp_path: Path) -> None:
    """B continued beyond the old length, RALEARN did not."""
    before = study_of(finished)
    finished.extend()
    finished.run("B", StopAfter(9))

    def complete(place: Place) -> None:
        if (place.directory / "undo.json").exists():
            finish_extension(place.directory)
        elif (place.directory / f"plan-{FIRST}.json").exists():  # interrupted before the first change
            undo(place.settings)

    assert interrupt_at_every_step(finished, tmp_path, lambda place: undo(place.settings), complete) > 15
    undo(finished.settings)
    assert study_of(finished) == before


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize(
    "name", ["runs/B0/run.json", "runs/B0/config", "runs/B0/metrics.jsonl", "expected.json"]
)
def test_a_missing_file_or_a_folder_in_its_place_does_not_block_the_undoing(
    finished: Place, name: str, continued: bool
) -> None:
    before = outcome(finished.folder("B"))
    finished.extend()
    if continued:
        finished.run("B")
    longer = (finished.folder("B") / "checkpoint").exists()
    path = finished.directory / name
    path.unlink(missing_ok=True)
    if not name.endswith("run.json"):  # `make` moves a damaged one away
        path.mkdir()
    undo(finished.settings)
    assert same(outcome(finished.folder("B")), before)
    assert (finished.directory / f"undone-{2 * FIRST}/runs/B0/checkpoint").exists() == longer


def test_a_report_of_the_longer_runs_is_not_current_after_undoing(finished: Place) -> None:
    finished.extend()
    finished.run("B")
    write_study(finished.directory, [], InputText("nothing", 0))
    write.write_report(finished.directory)
    assert write.is_current(finished.directory)
    undo(finished.settings)
    assert not write.is_current(finished.directory)


@pytest.mark.parametrize(
    "text",
    ["[", "{}", '{"previous": "plan.json", "into": "x"}', '{"previous": "plan-1.json", "into": "../x"}'],
)
def test_a_damaged_undo_file_is_named_and_nothing_changes(finished: Place, text: str) -> None:
    finished.extend()
    (finished.directory / "undo.json").write_text(text)
    before = contents(finished.directory)
    with pytest.raises(UserError, match=r"undo\.json cannot be read: .*; fix: write "):
        undo(finished.settings)
    assert contents(finished.directory) == before


def test_the_commands_say_which_one_is_right(finished: Place) -> None:
    (finished.directory / "undo.json").write_text(
        json.dumps({"previous": "plan-10.json", "into": "undone-20"})
    )
    assert "make extend UNDO=1" in finished.refusal()
