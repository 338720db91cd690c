"""`make help`: the targets with the line that stands beside each in the Makefile, and the defconfigs."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.kconfig import listing


def targets(makefile: str) -> list[tuple[str, str]]:
    """(target, one line) of every target with a `##` comment, in the Makefile's order."""
    found = re.findall(r"^([\w%-]+):[^#\n]*##\s*(.+)$", makefile, re.MULTILINE)
    return [
        ("make" if name == "all" else f"make {name.replace('-%', '-NAME')}", text) for name, text in found
    ]


def main() -> None:
    for name, text in targets(Path("Makefile").read_text()):
        print(f"  {name:24} {text}")
    for title, rows in listing().items():
        print(f"\n{title}")
        for name, text in rows:
            print(f"  {name:24} {text}")
    print("\nPYTHON=python3 uses that interpreter as it is instead of .venv.")


if __name__ == "__main__":
    main()
