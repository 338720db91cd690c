"""`make check`: the linter, the formatter, the type checker and the tests; stops at nothing, fails if any failed."""

from __future__ import annotations

import os
import subprocess
import sys

from gpt2.hardware.cpu import memory_bytes

PROCESS_BYTES = 2 * 2**30  # that a process of tests needs at most
MOST_PROCESSES = 8
PROCESSES = str(max(1, min(os.cpu_count() or 1, memory_bytes() // PROCESS_BYTES, MOST_PROCESSES)))
CHECKS = (
    ("ruff check", ["-m", "ruff", "check", "."]),
    ("ruff format", ["-m", "ruff", "format", "--check", "."]),
    ("mypy", ["-m", "mypy"]),
    # a file's tests stay together, since they share what was made for them
    ("pytest", ["-m", "pytest", "--numprocesses", PROCESSES, "--dist", "loadfile"]),
)


def main() -> int:
    # one thread each: processes that all compute with as many threads as there are cores wait for each other
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    failed = []
    for name, arguments in CHECKS:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, *arguments], env=environment).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
