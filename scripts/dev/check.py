"""`make check`: run the linter, the formatter, the type checker and the tests; fail if any of them failed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from runtime.detected_hardware import memory_bytes
from runtime.errors import run_command

PROCESS_BYTES = 2 * 2**30  # peak memory of a test process
MOST_PROCESSES = 8
PROCESSES = str(max(1, min(os.cpu_count() or 1, memory_bytes() // PROCESS_BYTES, MOST_PROCESSES)))
CHECKS = (
    ("ruff check", ["-m", "ruff", "check", "."]),
    ("ruff format", ["-m", "ruff", "format", "--check", "."]),
    # One process runs all tests of a file, since they share fixtures. tests/conftest.py puts slow files first.
    ("pytest", ["-m", "pytest", "--numprocesses", PROCESSES, "--dist", "loadfile", "--no-loadscope-reorder"]),
)
MYPY = ["-m", "mypy"]  # one process of a minute, beside the other checks


def main() -> int:
    # one thread per process; more threads than cores would slow all of them down
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"} | os.environ
    environment.pop("MAKE_GOALS", None)  # tests give the commands variables that `make check` does not read
    failed = []
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen([sys.executable, *MYPY], env=environment, stdout=output, stderr=output) as types,
    ):
        for name, arguments in CHECKS:
            print(f"== {name}", flush=True)
            if subprocess.run([sys.executable, *arguments], env=environment).returncode:
                failed.append(name)
        print("== mypy", flush=True)
        if types.wait():
            failed.append("mypy")
        output.seek(0)
        print(output.read().decode(errors="replace"), end="")
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
