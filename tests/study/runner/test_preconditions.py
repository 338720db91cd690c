"""Damaged files of a study are moved away before it runs, and nothing else is."""

import os
from pathlib import Path

import pytest

from gpt2.system.errors import UserError
from study.runner.preconditions import locked, quarantine_damaged, refuse_another_configuration
from tests.study.sample_records import a_study

TEXT = "CONFIG_SCHEDULE_WSD=y\nCONFIG_GPT2_MAX_ITERS=10\n"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    a_study(tmp_path, seeds=1, variants=("B", "RAALL"))
    for path in (tmp_path, *tmp_path.glob("runs/*")):
        (path / "config").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize(("line", "differs"), [('""', False), ('"1e-3 2e-3"', True)])
def test_a_study_of_an_older_version_tuned_no_learning_rate(study: Path, line: str, differs: bool) -> None:
    now = f"{TEXT}CONFIG_LEARNING_RATES={line}\nCONFIG_GPT2_HARD_LIMIT=0\n"
    for path in (study, *study.glob("runs/*")):
        (path / "config").write_text(f"{TEXT}CONFIG_GPT2_HARD_LIMIT=0\n")
    if differs:
        with pytest.raises(UserError, match='CONFIG_LEARNING_RATES: "" -> "1e-3 2e-3"'):
            refuse_another_configuration(study, now)
    else:
        refuse_another_configuration(study, now)


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


def test_the_number_of_ranks_may_change_between_two_commands(study: Path) -> None:
    before = (study / "config").read_text()
    refuse_another_configuration(study, before + "CONFIG_RANKS=4\nCONFIG_RANKS_TIMEOUT=60\n")


def test_the_monitor_may_be_turned_on_in_a_study_that_has_begun(study: Path) -> None:
    before = (study / "config").read_text()
    refuse_another_configuration(
        study, before + 'CONFIG_MONITOR=y\nCONFIG_MONITOR_TARGETS="all"\nCONFIG_MONITOR_INTERVAL=1\n'
    )


def test_a_study_from_before_the_choice_of_a_tokenizer_continues_with_gpt2s_alone(study: Path) -> None:
    before = (study / "config").read_text()
    assert "TOKENIZER" not in before
    refuse_another_configuration(
        study, before + "CONFIG_TOKENIZER_GPT2=y\n# CONFIG_TOKENIZER_BYTES is not set\n"
    )
    with pytest.raises(UserError, match="CONFIG_TOKENIZER_BYTES: None -> y"):
        refuse_another_configuration(study, before + "CONFIG_TOKENIZER_BYTES=y\n")


def test_without_the_study_s_configuration_that_of_a_run_is_compared(study: Path) -> None:
    (study / "config").write_bytes(b"\xff")
    (study / "runs/B0/config").write_bytes(b"\xff")
    refuse_another_configuration(study, TEXT)
    with pytest.raises(UserError, match="CONFIG_GPT2_MAX_ITERS: 10 -> 11"):
        refuse_another_configuration(study, TEXT.replace("10", "11"))
