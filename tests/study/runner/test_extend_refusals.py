"""An impossible extension is refused in one line with the fix, and changes nothing."""

import dataclasses
from fractions import Fraction
from pathlib import Path

import pytest

from gpt2.artifacts import run_record
from gpt2.system.errors import UserError
from study.runner import preconditions
from study.runner.extend import parse_factor
from study.runner.preconditions import refuse_another_configuration
from tests.study.extended import FIRST, START, TEXT, Place, configuration

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("factor", ["1", "0.5", "-2", "two", "nan", "1e3", ""])
def test_a_factor_of_at_most_one_is_refused(factor: str) -> None:
    with pytest.raises(UserError, match="FACTOR=2"):
        parse_factor(factor)


def test_a_factor_is_read_exactly() -> None:
    assert parse_factor("1.1") == Fraction(11, 10)


def test_a_factor_too_small_to_add_an_iteration_is_refused(finished: Place) -> None:
    assert "adds no iteration" in finished.refusal("1.05")


def test_a_cosine_is_refused_with_the_fix(finished: Place) -> None:
    finished.config = dataclasses.replace(
        finished.config, optimizer=dataclasses.replace(finished.config.optimizer, schedule="cosine")
    )
    message = finished.refusal()
    assert "ended at its count" in message
    assert "CONFIG_SCHEDULE_WSD=y" in message
    assert "CONFIG_STUDY_NAME" in message


def test_noise_is_refused_because_it_depends_on_the_planned_iterations(tmp_path: Path, texts: Path) -> None:
    place = Place(tmp_path, configuration(texts), ("B", "B+AQN=mild"))
    assert "B+AQN=mild cannot be extended: the size of its noise depends" in place.refusal()


@pytest.mark.parametrize("status", ["failed", "interrupted", "running"])
def test_an_unfinished_run_is_named(finished: Place, status: str) -> None:
    finished.alter("RALEARN", status=status)
    assert f"RALEARN0 is {status}" in finished.refusal()


def test_a_missing_run_is_named(finished: Place) -> None:
    finished.settings = dataclasses.replace(finished.settings, seeds=2)
    assert "B1/run.json does not exist; fix: `make`" in finished.refusal()


def test_a_run_outside_the_configuration_is_extended_with_the_others(finished: Place) -> None:
    finished.settings = dataclasses.replace(finished.settings, variants=("B",))
    assert finished.extend()[0].endswith("because .config does not name them: RALEARN0")
    assert run_record.load(finished.folder("RALEARN")).status == "interrupted"


def test_a_truncated_schedule_is_refused(finished: Place) -> None:
    finished.alter(schedule={"iterations": FIRST, "cut": True})
    assert "a time limit cut B0 before its 10 iterations" in finished.refusal()


def test_a_run_of_another_plan_is_refused(finished: Place) -> None:
    finished.alter(schedule={"iterations": FIRST - 1, "cut": False})
    assert f"planned with {FIRST - 1} iterations" in finished.refusal()


def test_without_the_checkpoint_before_the_decay_an_extension_is_refused(finished: Place) -> None:
    stable = finished.folder("RALEARN") / "stable"
    stable.rename(stable.with_name("elsewhere"))
    assert f"no checkpoint of iteration {START}" in finished.refusal()


def test_a_damaged_checkpoint_before_the_decay_is_refused_and_nothing_is_changed(finished: Place) -> None:
    path = finished.folder("RALEARN") / "stable" / f"{START:08d}" / "state.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert "is altered" in finished.refusal()


def test_a_study_without_runs_is_refused(tmp_path: Path, texts: Path) -> None:
    place = Place(tmp_path, configuration(texts), ("B",))
    (place.directory / "plan.json").unlink()
    assert "nothing to extend" in place.refusal()


def test_a_disk_without_enough_space_is_refused_and_nothing_is_changed(
    finished: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preconditions, "free_bytes", lambda path: 2**20)
    assert "free space" in finished.refusal()


def test_a_running_study_is_not_extended(finished: Place) -> None:
    with preconditions.locked(finished.directory), pytest.raises(UserError, match="is being run"):
        finished.extend()


def test_another_budget_in_the_configuration_is_refused_with_the_extend_command(finished: Place) -> None:
    larger, smaller = (TEXT.replace("ITERS=10", f"ITERS={count}") for count in (20, 5))
    with pytest.raises(UserError, match=r"CONFIG_GPT2_MAX_ITERS: 10 -> 20.*make extend FACTOR=2"):
        refuse_another_configuration(finished.directory, larger)
    with pytest.raises(
        UserError, match=r"CONFIG_GPT2_MAX_ITERS: 10 -> 5.*restore the study's configuration$"
    ):
        refuse_another_configuration(finished.directory, smaller)
    finished.extend()  # the budget of .config is the first one
    refuse_another_configuration(finished.directory, TEXT)
    with pytest.raises(UserError, match="make extend"):
        refuse_another_configuration(finished.directory, TEXT.replace("ITERS=10", "ITERS=20"))
    with pytest.raises(UserError, match="CONFIG_LEARNING_RATE: None -> 1") as caught:
        refuse_another_configuration(finished.directory, TEXT + "CONFIG_LEARNING_RATE=1\n")
    assert "make extend" not in str(caught.value)


def test_for_a_cosine_the_fix_of_a_larger_budget_is_not_the_extend_command(tmp_path: Path) -> None:
    text = TEXT.replace("CONFIG_SCHEDULE_WSD=y", "CONFIG_SCHEDULE_COSINE=y")
    (tmp_path / "config").write_text(text)
    with pytest.raises(UserError, match="cosine schedule cannot be extended") as caught:
        refuse_another_configuration(tmp_path, text.replace("ITERS=10", "ITERS=20"))
    assert "make extend" not in str(caught.value)


def test_a_study_of_an_older_version_gets_no_new_runs_and_can_be_reported(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(TEXT)
    now = TEXT + "CONFIG_GPT2_HARD_LIMIT=0\n"
    with pytest.raises(UserError, match=r"older version.*`make report` still reads it; fix: .*STUDY_NAME"):
        refuse_another_configuration(tmp_path, now)
    (tmp_path / "config").write_text(now)
    refuse_another_configuration(tmp_path, now)


def test_the_equivalence_margin_of_a_study_does_not_change(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(TEXT + 'CONFIG_EQUIVALENCE_MARGIN_PERCENT="1.0"\n')
    with pytest.raises(UserError, match=r'CONFIG_EQUIVALENCE_MARGIN_PERCENT: "1.0" -> "5.0"'):
        refuse_another_configuration(tmp_path, TEXT + 'CONFIG_EQUIVALENCE_MARGIN_PERCENT="5.0"\n')
