"""`make help`: the targets with the line that stands beside each in the Makefile, and the defconfigs.

Standard library only: it is what one types first.
"""

from __future__ import annotations

import re
from pathlib import Path

from kconfig.commands import listing

TARGET = re.compile(r"^([\w.%-]+):[^#\n]*##[ \t]*(\S.*)$", re.MULTILINE)


def targets(makefile: str) -> list[tuple[str, str]]:
    """(command, one line) of every target with a `##` comment, in the Makefile's order."""
    return [
        ("make" if name == "all" else f"make {name.replace('-%', '-NAME')}", text.strip())
        for name, text in TARGET.findall(makefile)
    ]


def lines(rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:{width}}  {text}".rstrip() for name, text in rows]


def main() -> None:
    print(*lines(targets(Path("Makefile").read_text(encoding="utf-8"))), sep="\n")
    for title, rows in listing().items():
        print("", title, *lines(rows), sep="\n")
    print("\nPYTHON=python3 uses that interpreter as it is instead of .venv.")


if __name__ == "__main__":
    main()
