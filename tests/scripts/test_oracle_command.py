"""`make oracle`: the operations of a recorded step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from referee.numerics import Recorder, RecorderConfig
from scripts import oracle as command
from tests.checkout import link_project


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    link_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RA_DETECTED", "cpu")
    monkeypatch.setattr("sys.argv", ["oracle"])
    return tmp_path


def test_a_record_is_checked_and_its_folder_is_only_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(RecorderConfig(dump_path="records/B0", level="L1", task="tensor"))
    model = nn.Linear(4, 3)
    recorder.start(model)
    model(torch.randn(2, 4)).sum().backward()
    recorder.stop()
    recorder.step()
    before = {path: path.read_bytes() for path in Path("records/B0/step0").rglob("*") if path.is_file()}
    monkeypatch.setenv("MAKEFLAGS", " -- RECORD=records/B0/step0")
    assert command.main() == 0
    assert json.loads(Path("records/B0/step0-oracle/oracle.json").read_text())["verdict"] == "rounding"
    assert before == {
        path: path.read_bytes() for path in Path("records/B0/step0").rglob("*") if path.is_file()
    }
