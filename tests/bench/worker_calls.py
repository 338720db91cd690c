"""Functions that tests let a worker call."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gpt2.system.errors import UserError


def environment(*names: str) -> dict[str, str | None]:
    print("a library writes to the output")
    return {name: os.environ.get(name) for name in names}


def process_id() -> int:
    return os.getpid()


def fail(text: str) -> None:
    raise ValueError(text)


def refuse(text: str) -> None:
    raise UserError(text)


def end_by_signal() -> None:
    print("out of pages", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hang(compiler: Path) -> None:
    """Hang like a compiler does: a child has this process's output and does not end with it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    print("compiling", flush=True)
    compiler.write_text(str(child.pid))
    time.sleep(600)
