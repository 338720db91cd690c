"""Test `make help`: it lists every target of the Makefile and every defconfig."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from study.kconfig_commands import DEFCONFIGS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def shown() -> list[str]:
    """Run `make help` with the standard library only and return its lines."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "scripts.dev.help",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def rows(shown: list[str], name: str) -> list[str]:
    return [line for line in shown if re.match(rf"  {re.escape(name)}  +\S", line)]


def test_every_target_with_a_comment_is_listed_once(shown: list[str]) -> None:
    documented = [
        line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if "## " in line
    ]
    assert len(documented) > 10
    for target in documented:
        name = {"all": "make", "defconfig-%": "make defconfig-NAME"}.get(target, f"make {target}")
        assert len(rows(shown, name)) == 1, name


def test_every_defconfig_and_fragment_is_listed_once_with_its_description(shown: list[str]) -> None:
    files = [path for path in DEFCONFIGS.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        name = f"defconfig-{path.name}" if path.parent == DEFCONFIGS else f"+{path.name}"
        assert len(rows(shown, name)) == 1, f"{name} is not listed once, or its file has no first comment"
