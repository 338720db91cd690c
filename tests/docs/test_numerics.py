"""The worked case of docs/numerics.md has the output that the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")


def test_the_worked_case_names_the_function_that_the_page_names(tmp_path: Path) -> None:
    record = PAGE.partition("Save as `train_once.py`")[2]
    script = re.search(r"^    import sys\n(?:(?:    .*)?\n)*", record, re.MULTILINE)
    commands = re.findall(r"^    python (train_once.*|-m numerics compare .*)$", PAGE, re.MULTILINE)
    assert script
    assert len(commands) == 3
    (tmp_path / "train_once.py").write_text(textwrap.dedent(script[0]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command.split()],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    shown = [line.strip() for line in PAGE.splitlines()]
    for line in done.stdout.splitlines():
        if line.startswith(("verdict", "calls", "first divergence", "differs", "also", "next")):
            assert line in shown
    assert (tmp_path / "out/tree.html").exists()
    (view,) = re.findall(r"^    python (-m numerics view .*)$", PAGE, re.MULTILINE)
    subprocess.run([sys.executable, *view.split()], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "tree.html").exists()
