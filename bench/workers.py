"""Start worker processes, call functions in them, and stop them. Every measurement of the benches runs in a worker."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Self, TypeVar

from runtime.errors import UserError, one_line
from study.executors.child_process import exit_text, process_settings

T = TypeVar("T")
EXIT_SECONDS = 60.0  # until a worker that gets no more calls is killed
MESSAGE_LINES, MESSAGE_CHARACTERS = 3, 600


class BenchError(UserError, RuntimeError):
    """A case could not be measured."""


def last_lines(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return " / ".join(lines[-MESSAGE_LINES:])[:MESSAGE_CHARACTERS] or "no message"


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
                    raise BenchError(f"{self.label}: {result}")
            self.process.join(EXIT_SECONDS)
            reason = exit_text(self.process.exitcode or 0)
        else:
            self.process.kill()
            reason = f"no answer within {limit_seconds:,.0f} s, so it was killed"
        self._output.seek(0)
        raise BenchError(f"{self.label}: {reason}; last message: {last_lines(self._output.read())}")

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
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {one_line(error)}"[:MESSAGE_CHARACTERS])
        connection.send(answer)
