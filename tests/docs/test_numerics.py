"""The worked case of docs/numerics.md has the output that the page shows."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from numerics import PrecisionDebugger, RecorderConfig
from numerics.__main__ import main
from numerics.runs.logp_files import compare_files

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")


def test_the_worked_case_names_the_function_that_the_page_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = PAGE.partition("Save as `train_once.py`")[2]
    script = re.search(r"^    import sys\n(?:(?:    .*)?\n)*", record, re.MULTILINE)
    commands = re.findall(
        r"^    (?:PYTHONHASHSEED=1234 )?python (train_once.*|-m numerics compare .*)$", PAGE, re.MULTILINE
    )
    assert script
    assert len(commands) == 3
    (tmp_path / "train_once.py").write_text(textwrap.dedent(script[0]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1234"}
    *trainings, compare = commands
    for command in trainings:
        done = subprocess.run(
            [sys.executable, *command.split()],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "PYTHONHASHSEED" not in done.stderr
    monkeypatch.chdir(tmp_path)
    assert compare.startswith("-m numerics compare ")
    assert main(compare.split()[2:]) == 0
    printed = capsys.readouterr().out
    assert "first divergence" in printed
    shown = [line.strip() for line in PAGE.splitlines()]
    for line in printed.splitlines():
        if line.startswith(("verdict", "calls", "first divergence", "differs", "also", "next")):
            assert line in shown
    assert (tmp_path / "out/tree.html").exists()
    (view,) = re.findall(r"^    python (-m numerics view .*)$", PAGE, re.MULTILINE)
    assert main(view.split()[2:]) == 0
    assert (tmp_path / "tree.html").exists()


def test_the_configuration_of_the_page_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"^    \{\n(?:    .*\n)+?    \}\n", PAGE, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(text)
    debugger = PrecisionDebugger(config_path="config.json")
    model = torch.nn.Linear(2, 2)
    debugger.start(model)
    model(torch.ones(1, 2)).sum().backward()
    debugger.stop()
    debugger.step()
    data = json.loads(Path("dump/step0/rank0/dump.json").read_text())["data"]
    assert data["Module.Linear.forward.0"]["output"][0]["md5"]
    assert "Functional.linear.0.forward" in data


def test_the_table_of_settings_has_every_default_and_every_argument() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\S+)` \| (yes|no) \|", PAGE, re.MULTILINE)
    defaults = {one.name: one.default for one in fields(RecorderConfig)}
    shown = {name: json.loads(default) for name, default, _ in rows}
    assert {name: tuple(one) if isinstance(one, list) else one for name, one in shown.items()} == defaults
    arguments = {name for name, _, argument in rows if argument == "yes"}
    assert arguments == inspect.signature(PrecisionDebugger).parameters.keys() - {"config_path"}


def test_the_files_of_log_probabilities_of_the_page_are_read(tmp_path: Path) -> None:
    examples = re.findall(r"^\| `.json` \| `(.*?)`:", PAGE, re.MULTILINE)
    assert len(examples) == 2
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, text in zip(paths, examples, strict=True):
        path.write_text(text)
    found = compare_files(*paths)
    assert found.value == 0
    assert [one.tokens for one in found.sequences] == [1, 1]
