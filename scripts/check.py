"""`make check`: the linter, the formatter, the type checker and the tests; stops at nothing, fails if any failed."""

from __future__ import annotations

import subprocess
import sys

CHECKS = (
    ("ruff check", ["-m", "ruff", "check", "."]),
    ("ruff format", ["-m", "ruff", "format", "--check", "."]),
    ("mypy", ["-m", "mypy"]),
    ("pytest", ["-m", "pytest"]),
)


def main() -> int:
    failed = []
    for name, arguments in CHECKS:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, *arguments]).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
