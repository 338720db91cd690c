"""`python -m referee`: readers that end, full disks, and paths that cannot be used."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from referee.__main__ import main

ROOT = Path(__file__).parents[3]
LONG = "x" * 300
TENSOR = {
    "type": "torch.Tensor",
    "dtype": "torch.float32",
    "shape": [2],
    "Max": 1,
    "Min": 0,
    "Mean": 0.5,
    "Norm": 1,
}
READING = [
    ["compare", "-tp", "PATH", "-gp", "record"],
    ["compare", "-tp", "record", "-gp", "record", "--map", "PATH"],
    ["view", "-tp", "PATH"],
    ["diagnose", "PATH", "b.csv"],
    ["check-config", "pack", "PATH"],
    ["check-config", "compare", "PATH", "PATH"],
    ["logp-diff", "PATH", "logp.json"],
    ["trend", "PATH"],
]
WRITING = [
    ["compare", "-tp", "record", "-gp", "record", "-o", "PATH"],
    ["view", "-tp", "record", "-o", "PATH"],
    ["diagnose", "a.csv", "b.csv", "-o", "PATH"],
    ["check-config", "pack", "-o", "PATH"],
    ["check-config", "compare", "a.zip", "a.zip", "-o", "PATH"],
    ["logp-diff", "logp.json", "logp.json", "-o", "PATH"],
    ["trend", "monitor", "-o", "PATH"],
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a record of two ranks, two loss files, a zip and log-probabilities."""
    folder = tmp_path_factory.mktemp("inputs")
    for rank in ("rank0", "rank1"):
        path = folder / "record/step0" / rank
        path.mkdir(parents=True)
        (path / "dump.json").write_text(json.dumps({"data": {"Torch.relu.0.forward": {"output": [TENSOR]}}}))
    (folder / "monitor/rank0").mkdir(parents=True)
    (folder / "monitor/rank0/param_0-9.csv").write_text("vpp_stage,name,step,norm\n0,a,1,1\n")
    (folder / "a.csv").write_text("step,loss\n0,2\n1,1\n")
    (folder / "b.csv").write_text("step,loss\n0,4\n1,1\n")
    (folder / "logp.json").write_text('{"log_probs": [[-1, -2]]}')
    with contextlib.chdir(folder):
        assert main(["check-config", "pack", "-o", "a.zip"]) == 0
    return folder


@pytest.fixture
def folder(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a copy of the inputs."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    return tmp_path


def failed(command: Sequence[str], path: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that cannot use a path. Returns its one line on stderr."""
    assert main([path if word == "PATH" else word for word in command]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert "fix: " in error
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("command", [*READING, *WRITING], ids=" ".join)
def test_a_name_that_is_too_long_is_one_line(
    command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert LONG in failed(command, LONG, capsys)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (WRITING[0], "out/compare.html"),
        (WRITING[2], "out/diagnose.json"),
    ],
)
def test_a_folder_in_place_of_a_file_is_named(
    command: list[str], name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).mkdir(parents=True)
    assert failed(command, "out", capsys).startswith(f"error: {name} cannot be written: ")
    assert not list(folder.rglob("*.tmp"))


COMMANDS = [["logp-diff", "logp.json", "logp.json"], ["--help"]]


def printed_to(
    stream: int, command: Sequence[str], buffered: bool, folder: Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "referee", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "" if buffered else "1"},
        stdout=stream,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_ends_is_no_error(command: list[str], buffered: bool, folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = printed_to(writer, command, buffered, folder)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("buffered", [True, False])
def test_an_output_on_a_full_disk_is_one_line(buffered: bool, folder: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = printed_to(full.fileno(), COMMANDS[0], buffered, folder)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1
