"""`make bench` on the command line: its suites, their options, and the errors for unknown ones."""

import re
import subprocess
import sys
from pathlib import Path

from bench.suite import NAMES, load_suite

ROOT = Path(__file__).parents[2]
SUITES = [load_suite(name) for name in NAMES]


def test_every_module_of_the_suites_is_a_suite_under_its_name() -> None:
    folder = ROOT / "bench" / "suites"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in folder.glob("*/__init__.py")}
    assert set(NAMES) == modules
    assert [suite.name for suite in SUITES] == list(NAMES)


def test_the_page_on_the_benches_lists_every_suite() -> None:
    page = (ROOT / "docs" / "benches.md").read_text()
    assert re.findall(r"^\| `make bench SUITE=(\w+)`", page, re.MULTILINE) == list(NAMES[1:])


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.bench", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_an_unknown_suite_is_an_error_of_one_line_with_the_existing_ones() -> None:
    done = command("--suite", "growht")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"unknown suite 'growht'; fix: make bench SUITE={'|'.join(NAMES)}" in done.stderr
