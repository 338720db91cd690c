"""A study only grows; damaged files of it are moved away before it runs, and nothing else is."""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.batch_plan import plan_batch
from runtime.errors import UserError
from runtime.run_plan import RunPlan
from scripts import study as command
from study.kconfig_rules import load_kconfig
from study.preconditions import (
    locked,
    quarantine_damaged,
    refuse_another_configuration,
    refuse_another_plan,
)
from study.study_settings import declared
from tests import small_runs
from tests.checked_files import write_checked
from tests.study.sample_records import a_study

SYMBOLS = sorted(symbol.name for symbol in load_kconfig("cpu").unique_defined_syms)
VALUES = dict.fromkeys(SYMBOLS, "10") | {"SEEDS": "3", "VARIANTS": '"B RALEARN GATED"', "PRIMARY": '""'}


def text(**changes: str) -> str:
    """Return a .config with a value for every symbol."""
    return "".join(f"CONFIG_{name}={value}\n" for name, value in (VALUES | changes).items())


TEXT = text()


@pytest.fixture
def study(tmp_path: Path) -> Path:
    a_study(tmp_path, seeds=1, variants=("B", "RAALL"))
    for path in (tmp_path, *tmp_path.glob("runs/*")):
        (path / "config").write_text(TEXT)
    return tmp_path


def content(study: Path) -> dict[str, bytes]:
    paths = (path for path in study.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(study)): path.read_bytes() for path in paths}


def test_a_study_without_damage_does_not_change(study: Path) -> None:
    before = content(study)
    assert quarantine_damaged(study) == []
    assert content(study) == before


def test_each_damaged_file_is_moved_and_named_with_its_reason(study: Path) -> None:
    damage = {"runs/B0/run.json": b'{"schema": 1}', "config": b"CONFIG_A=\xff\n"}
    for name, harmed in damage.items():
        (study / name).write_bytes(harmed)
    messages = quarantine_damaged(study)
    for name, message in zip(("config", "runs/B0/run.json"), messages, strict=True):
        moved = (study / name).parent / "damaged" / Path(name).name
        assert not (study / name).exists()
        assert moved.read_bytes() == damage[name]
        assert message.startswith(f"{study / name} ")
        assert f"moved to {moved}; " in message


def test_a_second_damaged_file_of_one_name_does_not_replace_the_first(study: Path) -> None:
    for text in ("[", "{"):
        (study / "runs/B0/run.json").write_text(text)
        quarantine_damaged(study)
    assert (study / "runs/B0/damaged/run.json").read_text() == "["
    assert (study / "runs/B0/damaged/run.json.2").read_text() == "{"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_a_folder_in_the_place_of_a_file_is_moved(study: Path, make: object) -> None:
    record = study / "runs/B0/run.json"
    record.unlink()
    make(record)  # type: ignore[operator]
    assert len(quarantine_damaged(study)) == 1
    assert not os.path.lexists(record)


def test_nothing_is_moved_while_the_study_is_running(study: Path) -> None:
    (study / "config").write_bytes(b"\xff")
    before = content(study)
    with locked(study), pytest.raises(UserError, match="is being run"):
        quarantine_damaged(study)
    assert content(study) == before


def test_a_running_study_is_refused_before_anything_is_loaded_and_no_other_is(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured = SimpleNamespace(results_dir=study.parent, name=study.name)
    monkeypatch.setattr(command, "load", lambda: (None, None, configured))
    monkeypatch.setattr(command, "first_line", lambda config, settings: "")
    monkeypatch.setitem(sys.modules, "study.study", None)  # it loads torch
    with locked(study), pytest.raises(UserError, match=f"is being run by process {os.getpid()} "):
        command.main()
    with pytest.raises(ImportError):
        command.main()
    configured.name = "not begun"
    with pytest.raises(ImportError):
        command.main()
    assert not (study.parent / "not begun").exists()


@pytest.mark.parametrize("name", [name for name in SYMBOLS if declared(name).entry != "design"])
def test_after_the_first_run_no_symbol_of_effect_changes(study: Path, name: str) -> None:
    if declared(name).effect in ("free", "rounding"):
        refuse_another_configuration(study, text(**{name: "11"}))
        return
    with pytest.raises(UserError) as caught:
        refuse_another_configuration(study, text(**{name: "11"}))
    assert f"{study / 'config'} has another configuration than .config (CONFIG_{name}: 10 -> 11)" in str(
        caught.value
    )
    assert "fix: set another CONFIG_STUDY_NAME, or restore" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"SEEDS": "4"}, False),
        ({"SEEDS": "2"}, True),
        ({"VARIANTS": '"B RALEARN MINE GATED"'}, False),
        ({"VARIANTS": '"B RALEARN"'}, True),
        ({"VARIANTS": '"B GATED RALEARN"'}, True),  # it makes GATED the primary comparison
        ({"PRIMARY": '"RALEARN"'}, False),  # it was the first that is not a control arm
        ({"PRIMARY": '"GATED"'}, True),
    ],
)
def test_seeds_and_variants_are_only_added(study: Path, changes: dict[str, str], refused: bool) -> None:
    if refused:
        with pytest.raises(UserError, match="has another configuration than"):
            refuse_another_configuration(study, text(**changes))
    else:
        refuse_another_configuration(study, text(**changes))
    shutil.rmtree(study / "runs")
    write_checked(study / "plan.json", {})
    refuse_another_configuration(study, text(**changes))  # before the first run


def test_a_configuration_without_a_plan_and_a_run_binds_nothing(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(TEXT)
    refuse_another_configuration(tmp_path, text(LEARNING_RATE="11"))


def test_without_the_study_s_configuration_that_of_a_run_is_compared(study: Path) -> None:
    (study / "config").write_bytes(b"\xff")
    (study / "runs/B0/config").write_bytes(b"\xff")
    refuse_another_configuration(study, TEXT)
    with pytest.raises(UserError, match=r"RAALL0/config .*CONFIG_GPT2_MAX_ITERS: 10 -> 11"):
        refuse_another_configuration(study, text(GPT2_MAX_ITERS="11"))


def other_rate(plan: RunPlan) -> RunPlan:
    optimizer = replace(plan.settings.optimizer, learning_rate=1e-3)
    return plan.replace(settings=replace(plan.settings, optimizer=optimizer))


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda plan: plan, ""),
        (lambda plan: plan.replace(batch=plan_batch(4, 1, 1, 16), predicted_bytes=9), ""),
        (lambda plan: plan.replace(settings=replace(plan.settings, checkpoint_seconds=1)), ""),
        (lambda plan: plan.replace(iterations=9), "iterations: 10 -> 9"),
        (other_rate, "settings.optimizer.learning_rate: 0.003 -> 0.001"),
    ],
)
def test_a_run_that_has_begun_continues_only_by_the_plan_that_gives_the_same_numbers(
    change: Callable[[RunPlan], RunPlan], differs: str, tmp_path: Path
) -> None:
    folder = tmp_path / "s/runs/B0"
    plan = small_runs.planned(folder, small_runs.configuration(tmp_path, 10), "B")
    refuse_another_plan(folder, change(plan))  # it has not begun
    (folder / "metrics.jsonl").write_text("")
    if not differs:
        refuse_another_plan(folder, change(plan))
        return
    with pytest.raises(UserError, match="fix: restore the file") as raised:
        refuse_another_plan(folder, change(plan))
    assert f"runs/B0/plan.json differs from the plan that the study makes now ({differs})" in str(
        raised.value
    )


def test_a_damaged_plan_of_a_run_that_has_begun_is_named_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "s/runs/B0"
    plan = small_runs.planned(folder, small_runs.configuration(tmp_path, 10), "B")
    (folder / "plan.json").write_bytes(content := (folder / "plan.json").read_bytes().replace(b"10", b"11"))
    refuse_another_plan(folder, plan)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"plan.json was altered: .*; fix: restore the file"):
        refuse_another_plan(folder, plan)
    assert (folder / "plan.json").read_bytes() == content
