"""The examples of docs/{numerics,diagnose,check-config,logp-diff}.md have the output that the pages show."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from referee.__main__ import main
from referee.numerics import PrecisionDebugger, RecorderConfig
from referee.numerics.runs.logp_diff import compare_files

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")


def save_example(page: str, name: str, folder: Path) -> None:
    """Save the script that a page has below the mention of its name."""
    script = re.search(r"^    import sys\n(?:(?:    .*)?\n)*", page.partition(f"`{name}`")[2], re.MULTILINE)
    assert script
    (folder / name).write_text(textwrap.dedent(script[0]))


# Each command in the same process, which imports torch once.
DRIVER = """
import runpy, sys
for line in sys.argv[1:]:
    sys.argv = line.split()
    runpy.run_path(sys.argv[0], run_name="__main__")
    print("--")
"""


def run_examples(commands: Sequence[str], folder: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1234"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *commands], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "PYTHONHASHSEED" not in done.stderr
    return done.stdout.split("--\n")[:-1]


def test_the_worked_case_names_the_function_that_the_page_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_example(PAGE, "train_once.py", tmp_path)
    commands = re.findall(
        r"^    (?:PYTHONHASHSEED=1234 )?python (train_once.*|-m referee compare .*)$", PAGE, re.MULTILINE
    )
    assert len(commands) == 3
    *trainings, compare = commands
    run_examples(trainings, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert compare.startswith("-m referee compare ")
    assert main(compare.split()[2:]) == 0
    printed = capsys.readouterr().out
    assert "first divergence" in printed
    shown = [line.strip() for line in PAGE.splitlines()]
    for line in printed.splitlines():
        if line.startswith(("verdict", "calls", "first divergence", "differs", "also", "next")):
            assert line in shown
    assert (tmp_path / "out/compare.html").exists()
    (view,) = re.findall(r"^    python (-m referee view .*)$", PAGE, re.MULTILINE)
    assert main(view.split()[2:]) == 0
    assert (tmp_path / "tree.html").exists()


def test_the_example_of_diagnose_has_the_symptom_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/diagnose.md").read_text(encoding="utf-8")
    save_example(page, "losses.py", tmp_path)
    commands = re.findall(r"`python (losses.py \w+) > (\w+.txt)`", page)
    assert len(commands) == 2
    printed = run_examples([command for command, _ in commands], tmp_path)
    for text, (_, file) in zip(printed, commands, strict=True):
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", *(file for _, file in commands)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("symptom", "next"))]
    assert set(lines) <= {line.strip() for line in page.splitlines()}


def test_the_example_of_the_checklist_has_the_rows_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/check-config.md").read_text(encoding="utf-8")
    save_example(page, "train_checked.py", tmp_path)
    commands = re.findall(r"`python (train_checked.py .*?)`", page)
    assert len(commands) == 2
    for command in commands:
        (tmp_path / "run.sh").write_text(f"python {command}\n")
        run_examples([command], tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["check-config", "compare", "a.zip", "b.zip"]) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = re.search(r"^    checklist: fatal\n(?:(?:    .*)?\n)*", page, re.MULTILINE)
    assert shown
    assert set(filter(None, map(str.strip, shown[0].splitlines()))) <= {line.strip() for line in printed}


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
    page = (ROOT / "docs/logp-diff.md").read_text(encoding="utf-8")
    examples = re.findall(r"^\| `.json` \| `(.*?)`:", page, re.MULTILINE)
    assert len(examples) == 2
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, text in zip(paths, examples, strict=True):
        path.write_text(text)
    found = compare_files(*paths)
    assert found.value == 0
    assert [len(row) for row in found.differences] == [1, 1]
