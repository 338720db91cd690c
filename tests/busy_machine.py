"""Other work on the machine, for tests of numbers that must not depend on it."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def other_work(processes: int) -> Iterator[None]:
    """Processes that each keep a core busy in the block."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
