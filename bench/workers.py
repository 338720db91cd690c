"""Start worker processes, call functions in them, and stop them. Every measurement of the benches runs in a worker."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Self, TypeVar

from runtime.errors import UserError
from study.executors.child_process import exit_text, process_settings

T = TypeVar("T")
EXIT_SECONDS = 60.0  # until a worker that gets no more calls is killed
# The line of an exception in Python's traceback, or the line of runtime.errors.run_command.
EXCEPTION = re.compile(r"(?:error|[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit))(?::|$)")
MESSAGE_LINES, MESSAGE_CHARACTERS = 3, 600


class BenchError(UserError, RuntimeError):
    """A case could not be measured."""


def last_message(output: str) -> str:
    """Extract the last exception and up to two lines after it, or the last lines where there is no exception.

    torch prints advice after an exception. The advice alone does not name the error.
    """
    output = output.partition("\nException ignored ")[0]  # from an interpreter that is already shutting down
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    at = [number for number, line in enumerate(lines) if EXCEPTION.match(line)]
    chosen = lines[at[-1] :][:MESSAGE_LINES] if at else lines[-MESSAGE_LINES:]
    return " / ".join(line.strip() for line in chosen)[:MESSAGE_CHARACTERS] or "no message"


class BenchWorker:
    """A process that executes calls in the environment of a training process. Leaving the context ends it.

    label: names the worker in errors. heap: see `process_settings`. Its output goes to a temporary file.
    """

    def __init__(self, label: str, heap: str | None = None) -> None:
        self.label = label
        self._output = tempfile.NamedTemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the process
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self.process = context.Process(target=_execute_calls, args=(other, self._output.name))
        settings = process_settings(os.environ, heap)
        added = settings.keys() - os.environ.keys()
        os.environ.update(settings)
        try:
            self.process.start()
        finally:
            other.close()
            for name in added:
                del os.environ[name]

    def call(self, function: Callable[..., T], *arguments: Any, limit_seconds: float | None = None) -> T:
        """Call a function in the worker and return its result.

        BenchError, with the reason, if it raises, if the process ends, or if it exceeds the limit and is killed.
        """
        with contextlib.suppress(OSError):  # the process may have ended
            self._connection.send((function, arguments))
        if wait([self._connection, self.process.sentinel], limit_seconds):
            with contextlib.suppress(EOFError, OSError):
                # A compiler started by an ended worker can keep the pipe open: poll, since recv would wait for it.
                if self._connection.poll():
                    succeeded, result = self._connection.recv()
                    if succeeded:
                        return result  # type: ignore[no-any-return]
                    raise BenchError(f"{self.label}: {last_message(result)}")
            self.process.join(EXIT_SECONDS)
            reason = exit_text(self.process.exitcode or 0)
        else:
            self.process.kill()
            reason = f"no answer within {limit_seconds:,.0f} s, so it was killed"
        self._output.seek(0)
        raise BenchError(f"{self.label}: {reason}; last message: {last_message(self._output.read())}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *others: object) -> None:
        """End the process. Kill it after an error, or if it does not exit within EXIT_SECONDS."""
        self._connection.close()
        self.process.join(0.0 if error else EXIT_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self._output.close()


def _execute_calls(connection: Connection, output: str) -> None:
    """Execute calls until the bench closes the connection. Send (True, result) or (False, error) for each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the bench, which ends its workers
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*arguments))
        except UserError as error:
            answer = (False, f"error: {error}")
        except Exception:
            answer = (False, traceback.format_exc())
        connection.send(answer)
