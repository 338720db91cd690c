"""`make stress` runs on the CPU, prints its report and writes the golden results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpt2.system.errors import REPORTED
from scripts.stress import __main__ as command


def stress(monkeypatch: pytest.MonkeyPatch, **given: str) -> int:
    monkeypatch.setattr(
        "sys.argv", ["scripts.stress", *(f"--{name}={value}" for name, value in given.items())]
    )
    return command.main()


def test_a_short_stress_of_the_cpu_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert stress(monkeypatch, minutes="0.001", out=str(tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert "No deviation on 1 device in" in printed
    (file,) = (tmp_path / "out").glob("stress-*.json")
    content = json.loads(file.read_text())
    assert content["faulty"] == []
    (golden,) = content["golden"].values()
    assert len(golden) > 10


@pytest.mark.parametrize(
    ("minutes", "message"),
    [("x", "MINUTES=x is not a number; fix: make stress"), ("0", "0 minutes cannot be used; fix")],
)
def test_wrong_minutes_are_one_line(minutes: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(REPORTED, match=message):
        stress(monkeypatch, minutes=minutes)


def test_the_processes_are_the_ranks_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.configured_ranks() == 1
    (tmp_path / ".config").write_text("CONFIG_RANKS=3\n")
    assert command.configured_ranks() == 3


def test_a_folder_that_cannot_be_used_is_known_before_the_stress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("numerics.stress.devices.workers", None)
    with pytest.raises(REPORTED, match="file cannot be written: it is not a folder; fix"):
        stress(monkeypatch, minutes="10", out=str(tmp_path / "file"))
