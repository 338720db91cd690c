"""macOS trains on its CPU; Windows is refused in one line; numerics needs no module that Windows lacks.

A whole study on macOS, without affinity and Linux files: tests/gpt2/hardware/test_mps_standin.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpt2.artifacts import run_record
from tests.checkout import ROOT

MACS_GPU = ROOT / "tests/fixtures/mps"  # with the stand-in for macOS
POSIX_ONLY = ("fcntl", "resource", "pwd", "grp", "termios", "pty", "syslog", "posix", "_posixsubprocess")


def run(folder: Path, path: Path | str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    environment |= {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"} | settings
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


CPU = """
import dataclasses, json, platform, sys
from pathlib import Path
from gpt2.config.config import ANY_TARGET
from gpt2.hardware.attention_kernels import attention_context, prepare_device
from gpt2.hardware.resolve import resolve
from study.executors.slots import SlotsError, local_slots
from study.memory.micro_batch import require_free
from tests.small_runs import configuration, start, write_texts

folder = Path(sys.argv[1])
config = configuration(write_texts(folder / "texts"), 2)
config = dataclasses.replace(config, target=dataclasses.replace(config.target, cpu_threads=0))
found = {"arm": resolve(ANY_TARGET)}
cpu = prepare_device(config.target, config.model)
with attention_context(cpu):
    status = start(folder / "run", config).train()
require_free(cpu, 1, 1)
try:
    local_slots(2, cpu, 0)
except SlotsError as error:
    refused = str(error)
platform.machine = lambda: "x86_64"
found["intel"] = resolve(ANY_TARGET)
print(json.dumps({
    "found": {name: [one.device, one.note] for name, one in found.items()}, "status": status, "refused": refused,
    "slots": len(local_slots(0, cpu, 0)), "system": sys.platform,
}))
"""


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what one process found on a Mac whose torch has no mps. It trained a run on the CPU."""
    folder = tmp_path_factory.mktemp("mac")
    path = [str(MACS_GPU), str(ROOT)]
    done = run(ROOT, os.pathsep.join(path), "-c", CPU, str(folder), FAKE_MPS="0")
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "folder": folder}


def test_a_mac_without_mps_uses_its_cpu(cpu: dict[str, Any]) -> None:
    device, note = cpu["found"]["arm"]
    assert device == "cpu"
    assert note == (
        f"torch {note.split()[1]} cannot use Apple M4: it was built without mps; so this study runs on the CPU"
    )
    assert cpu["found"]["intel"][0] == "cpu"
    assert "Apple" not in str(cpu["found"]["intel"][1])


def test_a_cpu_trains_without_affinity_and_linux_files(cpu: dict[str, Any]) -> None:
    assert (cpu["system"], cpu["status"]) == ("darwin", "finished")
    record = run_record.load(cpu["folder"] / "run")
    assert record.status == "finished"
    assert record.target.name == "cpu"
    assert record.memory


def test_without_affinity_several_slots_are_refused(cpu: dict[str, Any]) -> None:
    assert cpu["slots"] == 1
    assert cpu["refused"].startswith("CONFIG_SLOTS=2")
    assert "fix: " in cpu["refused"]


def test_windows_is_refused_in_one_line_by_every_command(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import pathlib, os\nos.name = 'nt'\n")
    for command in ("scripts.dev.setup", "scripts.study", "scripts.kconfig"):
        done = run(ROOT, tmp_path, "-m", command)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr == (
            "error: Windows has no POSIX signals and file locks, which the trainer needs; "
            "fix: use WSL 2 (docs/systems.md)\n"
        )


def test_numerics_imports_nothing_that_windows_lacks(tmp_path: Path) -> None:
    program = tmp_path / "every_module.py"
    program.write_text(
        "import importlib, importlib.abc, pkgutil, sys\n"
        "import torch, numpy\n"
        f"missing = {POSIX_ONLY!r}\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in missing:\n"
        "            raise ModuleNotFoundError(name)\n"
        "for name in missing:\n"
        "    sys.modules.pop(name, None)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import numerics\n"
        "names = [item.name for item in pkgutil.walk_packages(numerics.__path__, 'numerics.')]\n"
        "for name in names:\n"
        "    if not name.endswith('__main__'):\n"
        "        importlib.import_module(name)\n"
        "print(len(names))\n"
    )
    done = run(tmp_path, ROOT, str(program))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
