"""Windows is refused in one line; numerics needs no module that Windows lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.checkout import ROOT

POSIX_ONLY = ("fcntl", "resource", "pwd", "grp", "termios", "pty", "syslog", "posix", "_posixsubprocess")


def run(folder: Path, path: Path | str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    environment |= {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"} | settings
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


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
        "import importlib, importlib.abc, sys\n"
        "import torch, numpy\n"
        f"missing = {POSIX_ONLY!r}\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in missing:\n"
        "            raise ModuleNotFoundError(name)\n"
        "for name in missing:\n"
        "    sys.modules.pop(name, None)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import pathlib, referee\n"
        "top = pathlib.Path(referee.__file__).parent\n"
        "paths = [path.relative_to(top.parent) for path in top.rglob('*.py')]\n"
        "names = [str(path.with_suffix('')).replace('/', '.').removesuffix('.__init__') for path in paths]\n"
        "for name in names:\n"
        "    if not name.endswith('__main__'):\n"
        "        importlib.import_module(name)\n"
        "print(len(names))\n"
    )
    done = run(tmp_path, ROOT, str(program))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50
