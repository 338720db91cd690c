"""The example of docs/monitor.md: the script runs, and trend names the tensor that the page names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from referee.__main__ import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/monitor.md").read_text(encoding="utf-8")


def test_the_example_names_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (settings,) = re.findall(r'^    (\{"targets".*\})$', PAGE, re.MULTILINE)
    (script,) = re.findall(r"^    import argparse\n(?:(?:    .*)?\n)*?(?=\n    MONITOR)", PAGE, re.MULTILINE)
    (tmp_path / "monitor.json").write_text(settings)
    (tmp_path / "train_embedding.py").write_text(textwrap.dedent(script))
    monkeypatch.chdir(tmp_path)
    trainings = re.findall(r"^    MONITOR_OUTPUT_DIR=(\w+) python (.*)$", PAGE, re.MULTILINE)
    assert len(trainings) == 2
    for folder, command in trainings:
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MONITOR_OUTPUT_DIR": folder}
        done = subprocess.run(
            [sys.executable, *command.split()], env=os.environ | environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    (trend,) = re.findall(r"^    python -m referee (trend .*)$", PAGE, re.MULTILINE)
    assert main(trend.split()) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if re.search(r"\bstep \d", line)]
    (named,) = re.findall(r"The table names `(.*?)` at (step \d+)", PAGE)
    assert rows[0].startswith(named[0])
    assert named[1] in rows[0]
