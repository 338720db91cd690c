"""`make help`: list the targets with their Makefile comments, the defconfigs and the arms."""

from __future__ import annotations

import re
from pathlib import Path

from ra.arms import overview
from runtime.errors import run_command
from study.kconfig_commands import listing
from study.make_arguments import refuse_unknown_variables

NOTES = (
    "A run's NAME is its variant and seed: B0 is variant B with seed 0. A dot separates them after a digit (SHP2.0)",
    "and after listed layers (RA:5-7,9 with seed 0 is RA-5-7_9.0). Its folder is RESULTS_DIR/STUDY_NAME/runs/NAME.",
    "PYTHON=python3 uses that interpreter and installs nothing; without it, make uses .venv.",
)
TARGET = re.compile(r"^([\w.%-]+):[^#\n]*##[ \t]*(\S.*)$", re.MULTILINE)


def targets(makefile: str) -> list[tuple[str, str]]:
    """Return (command, comment) of every target with a `##` comment, in the Makefile's order."""
    return [
        ("make" if name == "all" else f"make {name.replace('-%', '-NAME')}", text.strip())
        for name, text in TARGET.findall(makefile)
    ]


def lines(rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:{width}}  {text}".rstrip() for name, text in rows]


def main() -> None:
    refuse_unknown_variables()
    print(*lines(targets(Path("Makefile").read_text(encoding="utf-8"))), sep="\n")
    for title, rows in listing().items():
        print("", title, *lines(rows), sep="\n")
    print("", *overview(), "", *NOTES, sep="\n")


if __name__ == "__main__":
    run_command(main)
