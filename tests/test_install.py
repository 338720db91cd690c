"""`pip install .` installs referee and nothing else, and the installed copy works without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEPS = """
import torch
from torch import nn
from referee.numerics import Recorder, RecorderConfig

for folder, approximation in (("a", "none"), ("b", "tanh")):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(approximate=approximation), nn.Linear(8, 2))
    recorder = Recorder(RecorderConfig(task="statistics", level="mix", dump_path=folder))
    recorder.start(model)
    model(torch.randn(4, 8)).sum().backward()
    recorder.stop()
    recorder.step()
"""
EVERY_MODULE = """
import importlib, pathlib, sys, referee
top = pathlib.Path(referee.__file__).parent
for path in top.rglob("*.py"):
    name = ".".join(path.relative_to(top.parent).with_suffix("").parts).removesuffix(".__init__")
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(referee.__file__)
print([name for name in ("runtime", "gpt2", "ra", "study", "scripts") if name in sys.modules])
"""
LIGHT = "import sys, referee.verdict.statistics, referee.verdict.loss_files; print('torch' in sys.modules)"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of a copy of the tracked files, so that no earlier build is in it."""
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if name.split("/")[0] == "referee" or "/" not in name or name == "docs/numerics.md":
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            (checkout / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        out,
        ".",
    ]
    subprocess.run(command, cwd=checkout, check=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_has_one_top_level_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"referee"}


def test_the_wheel_has_every_tracked_file_of_referee(wheel: Path) -> None:
    command = ["git", "ls-files", "referee"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert set(listed) <= set(zipfile.ZipFile(wheel).namelist())


def test_every_module_and_two_recorded_steps_work_in_the_installed_copy_alone(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "steps.py").write_text(STEPS + EVERY_MODULE)
    result = run(installed, tmp_path, "steps.py")
    assert result.stdout.splitlines() == [str(installed / "referee/__init__.py"), "[]"], result.stderr
    result = run(installed, tmp_path, "-m", "referee", "compare", "-tp", "b/step0", "-gp", "a/step0")
    assert result.returncode == 0, result.stderr
    assert "gelu" in result.stdout.lower()
    assert (tmp_path / "compare-records/compare.html").stat().st_size > 10_000


def test_a_verdict_loads_no_torch(installed: Path, tmp_path: Path) -> None:
    assert run(installed, tmp_path, "-c", LIGHT).stdout == "False\n"
