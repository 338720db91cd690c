"""Stop on request: SIGTERM, SIGHUP and the first SIGINT set a flag, which the run checks at safe points."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# The study passes Ctrl-C on as SIGTERM.
SAID = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "a request to stop",
    signal.SIGHUP: "the end of the terminal",
}


def end_with_parent(number: int = signal.SIGKILL, parent: int = 0) -> None:
    """On Linux, ask the kernel to send this process the signal when its parent dies.

    parent: process id. If that parent died before this call, the signal is sent at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if parent and os.getppid() != parent:
            os.kill(os.getpid(), number)


class Interrupted(BaseException):
    """A signal asked the run to stop. Not an Exception, so that no `except Exception` catches it."""


class Stop:
    """Flag set by a signal; `check` then raises Interrupted. A second SIGINT ends the process immediately.

    at_once: the signal itself raises Interrupted, as before the first step of a process, when nothing can be lost.
    """

    def __init__(self) -> None:
        self.requested, self.at_once = "", False
        self._interrupts = 0

    def install(self, parent: int = 0) -> Stop:
        """Install the handlers; on Linux also request SIGTERM at the parent's death. `parent` may already be dead.

        A signal then ends the process at once, until the first step sets `at_once` to False.
        """
        self.at_once = True
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._note)
        end_with_parent(signal.SIGTERM)
        if parent and os.getppid() != parent:
            self.requested = "the end of the study"
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts > 1:
            os._exit(128 + number)
        self.requested = SAID[signal.Signals(number)]
        if self.at_once:
            raise Interrupted(self.requested)

    def check(self) -> None:
        """Raise Interrupted if a signal asked to stop."""
        if self.requested:
            raise Interrupted(self.requested)
