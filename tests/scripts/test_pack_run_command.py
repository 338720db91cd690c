"""`make pack-run`: what a run recorded, as a zip that check-config compares."""

import sys
from pathlib import Path
from typing import Any

import pytest

from referee.numerics.setup.checklist_rows import EQUAL, FATAL, HARMLESS, NOT_RECORDED
from referee.numerics.setup.compared_checklists import compare_checklists
from runtime.errors import UserError
from scripts import pack_run
from tests.checked_files import write_checked
from tests.study import compared
from tests.study.evaluation.test_inspect import a_run, config_file

__all__ = ["config_file"]


def recorded(folder: Path, config: Path, variant: str = "B", **changes: dict[str, Any]) -> Path:
    """A run folder with a record of its machine. changes: part of run.json -> changed values."""
    run = a_run(folder, config, variant)
    value = compared.a_record(variant, 0, 3.0)
    for part, values in changes.items():
        value[part] |= values
    write_checked(run / "run.json", value)
    return run


def pack(monkeypatch: pytest.MonkeyPatch, run: Path, path: Path) -> Path:
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    monkeypatch.setattr(sys, "argv", ["scripts.pack_run", str(run), "--out", str(path)])
    assert pack_run.main() == 0
    return path


VARIABLE = {"variables": {"NVIDIA_TF32_OVERRIDE": "1"}}


@pytest.mark.parametrize(
    ("part", "change", "row"),
    [
        ("target", {"dtype": "float32"}, ("hyperparameters", "precision", FATAL)),
        ("environment", {"threads": 2}, ("machine", "threads", HARMLESS)),
        ("environment", VARIABLE, ("environment", "NVIDIA_TF32_OVERRIDE", FATAL)),
    ],
)
def test_a_difference_of_two_runs_is_named(
    tmp_path: Path,
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    change: dict[str, Any],
    row: tuple[str, str, str],
) -> None:
    a = pack(monkeypatch, recorded(tmp_path / "a", config_file), tmp_path / "a.zip")
    same = pack(monkeypatch, recorded(tmp_path / "c", config_file), tmp_path / "c.zip")
    assert a.read_bytes() == same.read_bytes()
    b = pack(monkeypatch, recorded(tmp_path / "b", config_file, **{part: change}), tmp_path / "b.zip")
    found = [check for check in compare_checklists(a, b) if check.status not in (EQUAL, NOT_RECORDED)]
    assert [(check.group, check.subject, check.status) for check in found] == [row]


def test_unusable_runs_are_errors(tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unmeasured = a_run(tmp_path, config_file, "B")
    for run in (tmp_path / "absent", tmp_path, unmeasured):
        with pytest.raises(UserError):
            pack(monkeypatch, run, tmp_path / "a.zip")
    (unmeasured / "run.json").write_text("{")
    with pytest.raises(UserError):
        pack(monkeypatch, unmeasured, tmp_path / "a.zip")
    assert not (tmp_path / "a.zip").exists()
