"""The training processes of a study, one at a time, and the requests to stop it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from study.child import Child


class StopAsked(BaseException):
    """A signal asked the study to stop."""


class Session:
    """asked: how many requests to stop there were. lock: the descriptor that holds the study's lock.

    The first request is passed on to the run, which saves. A second SIGINT ends the run at once; further SIGTERMs and
    SIGHUPs, and a first SIGINT after them, change nothing, since a supervisor, make and a terminal may each send their
    own.
    """

    def __init__(self) -> None:
        self.asked, self._interrupts = 0, 0
        self.lock: int | None = None
        self._child: Child | None = None
        self._closing = False

    @contextlib.contextmanager
    def process(self, arguments: list[str], log: Path) -> Iterator[Child]:
        """A training process that is never left behind; StopAsked where a request came before it."""
        if self.asked:
            raise StopAsked
        self._child = Child(arguments, log, self.lock)
        try:
            yield self._child
        finally:
            if self._child.process.poll() is None:
                self._child.stop()
            self._child = None

    def close(self) -> None:
        """From here on the study is stopping: requests to do so are heard already."""
        self._closing = True

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Listen to SIGINT, SIGTERM and SIGHUP in the block."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, self._ask) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._closing:
            return
        self.asked += 1
        self._interrupts += number == signal.SIGINT
        if self._child is None:
            raise StopAsked
        if number == signal.SIGINT and self._interrupts > 1:
            self._child.kill()
            return
        if self.asked == 1 or number == signal.SIGINT:
            once_more = "once more" if self._interrupts else "twice"
            print(f"\nstopping: the step is finished and saved (Ctrl-C {once_more}: at once)", flush=True)
        if self.asked == 1:
            self._child.process.send_signal(signal.SIGTERM)
