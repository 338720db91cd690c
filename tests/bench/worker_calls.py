"""Functions that tests let a worker call."""

import os
import signal
import sys

from runtime.errors import UserError


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
