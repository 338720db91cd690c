"""`python -m referee oracle`: operations of a record, generated values, files, two machines, unusable input."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from referee.__main__ import main
from referee.numerics import Recorder, RecorderConfig
from referee.numerics.oracle.command import check_record
from referee.numerics.rounding.operation_checks import Oracle
from tests.referee.numerics.compare.small_models import STATISTICS, TENSORS, record

VALUES = {"task": "tensor", "level": "mix"}


class Small(nn.Module):
    """Functions, layers, a tied input, an in-place operation, indices, a dropout, a QR decomposition."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.linear(x)))
        scores = (y @ y.transpose(-1, -2)).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf)
        mixed = F.softmax(scores, -1) @ torch.linalg.qr(y)[0]
        mixed = mixed * mixed
        return mixed.add_(1.0)[:, torch.tensor([0, 2, 2])]


def small_record(folder: Path, **settings: object) -> Path:
    torch.manual_seed(0)
    recorder = Recorder(RecorderConfig(dump_path=str(folder), **settings))  # type: ignore[arg-type]
    model, x = Small(), torch.randn(2, 5, 16)
    recorder.start(model)
    model(x).square().mean().backward()
    recorder.stop()
    recorder.step()
    return folder / "step0"


def checked(path: Path) -> Oracle:
    return check_record(path, path / "oracle", "cpu")


def wrong(report: Oracle) -> list[str]:
    return [check.text for check in report.checks if check.wrong]


@pytest.mark.parametrize("settings", [VALUES, {"level": "mix"}, {"task": "tensor"}], ids=str)
def test_a_clean_step_has_no_finding(settings: dict[str, str], tmp_path: Path) -> None:
    report = checked(small_record(tmp_path, **settings))
    assert wrong(report) == []
    labels = {check.label for check in report.checks}
    if "level" not in settings:
        assert labels == {"layer Linear", "layer LayerNorm"}
        return
    reasons = {skip.label: skip.reason for skip in report.skipped}
    assert reasons["Functional.dropout"] == "random"
    assert "sign" in reasons["Torch.linalg.qr"]
    functions = {"Functional.linear", "Functional.layer_norm", "Functional.softmax", "Tensor.__matmul__"}
    assert labels >= functions
    assert {"forward", "backward"} <= {check.direction for check in report.checks}
    runs = {check.how for check in report.checks if check.label == "Functional.linear"}
    assert runs >= {"device"} | ({"recorded"} if settings is VALUES else set())


def test_a_step_under_autocast_has_no_finding(tmp_path: Path) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = checked(small_record(tmp_path, **VALUES))
    assert wrong(report) == []
    assert {"bfloat16", "float32"} <= {check.dtype for check in report.checks}


def test_a_layer_with_another_forward_is_found_without_a_second_run(tmp_path: Path) -> None:
    """nn.GELU whose forward computes the other GELU: the functions within are right, the layer is not."""

    class Wrong(nn.GELU):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x, approximate="tanh")

    Wrong.__module__, Wrong.__qualname__ = nn.GELU.__module__, "GELU"
    report = checked(record(tmp_path, nn.Sequential(nn.Linear(8, 64), Wrong()), run=square_of, **TENSORS))
    assert {check.label for check in report.checks if check.wrong} == {"layer GELU"}


def square_of(model: nn.Module) -> None:
    model(torch.randn(4, 8)).square().mean().backward()


# -- the command


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32))
    return record(tmp_path_factory.mktemp("step"), model, run=square_of, **{**STATISTICS, "level": "L1"})


def test_two_machines_are_compared_on_the_same_inputs(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, options in (("a", []), ("b", ["--other", str(tmp_path / "a")])):
        assert main(["oracle", str(step), "-o", str(tmp_path / name), "--device", "cpu", *options]) == 0
        printed = capsys.readouterr().out
        assert "Operations against float64: rounding" in printed
        assert f"wrote {tmp_path / name / 'oracle.json'}" in printed
        content = json.loads((tmp_path / name / "oracle.json").read_text())
        assert (content["verdict"], content["counts"]["wrong"]) == ("rounding", 0)
        assert sum(content["counts"].values()) == len(content["rows"]) > 10
    rows = [row for row in content["rows"] if row["how"] == "device"]
    assert rows
    assert all(row["units"] == row["benchmark_units"] for row in rows)


def test_unusable_records_and_devices_are_one_line(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = record(tmp_path, nn.Sequential(nn.Dropout(0.5)), lambda model: model(torch.ones(3)))
    for arguments in ([str(tmp_path / "no")], [str(step), "--device", "nonsense"], [str(nothing)]):
        assert main(["oracle", *arguments, "-o", str(tmp_path / "o")]) == 1
        error = capsys.readouterr().err
        assert "fix: " in error
        assert len(error.splitlines()) == 1
