"""Targets are parsed, and switched on and off by a file."""

from pathlib import Path

import pytest

from referee.errors import NumericsError
from referee.numerics.monitor.targets import (
    CONTROL,
    ChangedFile,
    MonitorTarget,
    change_control,
    parse_targets,
    read_control,
)


@pytest.mark.parametrize(
    ("word", "kind", "name", "wanted"),
    [
        ("grad", "grad_reduced", "token.weight", True),
        ("grad", "param", "token.weight", False),
        ("grad:blocks.3", "grad_reduced", "blocks.3.mlp.fc.weight", True),
        ("grad:blocks.3", "grad_reduced", "blocks.30.mlp.fc.weight", False),
        ("actv:blocks.*.mlp", "actv", "blocks.7.mlp.output.0", True),
        ("adam", "exp_avg_sq", "x", True),
        ("all:norm.weight", "param", "norm.weight", True),
    ],
)
def test_targets(word: str, kind: str, name: str, wanted: bool) -> None:
    (target,) = parse_targets([word])
    assert target.wants(kind, name) == wanted
    assert str(target) == word


def test_targets_are_switched_on_and_off(tmp_path: Path) -> None:
    control = ChangedFile(tmp_path / CONTROL)
    assert not control.changed()
    change_control(tmp_path, ["grad:blocks.3", "actv"])
    change_control(tmp_path, ["actv"])
    assert control.changed()
    assert read_control(tmp_path) == (MonitorTarget("grad", "blocks.3"), MonitorTarget("actv"))
    assert not control.changed()
    change_control(tmp_path, ["param"], ["grad:blocks.3"])
    assert list(map(str, read_control(tmp_path))) == ["actv", "param"]
    with pytest.raises(NumericsError, match=r"adam is not switched on; fix: switch off actv, param, or all"):
        change_control(tmp_path, off=["adam"])
    change_control(tmp_path, off=["all"])
    assert control.changed()
    assert read_control(tmp_path) == ()


@pytest.mark.parametrize("content", ["{", '{"targets": ["x"]}'])
def test_a_file_that_cannot_be_used_changes_nothing_and_can_be_replaced(tmp_path: Path, content: str) -> None:
    change_control(tmp_path, ["param"])
    control = ChangedFile(tmp_path / CONTROL)
    control.changed()
    (tmp_path / "control.json").unlink()
    (tmp_path / "control.json").write_text(content)
    assert control.changed()
    with pytest.raises(NumericsError):
        read_control(tmp_path)
    change_control(tmp_path, ["adam"], ["all"])
    assert list(map(str, read_control(tmp_path))) == ["adam"]
