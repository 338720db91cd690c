"""Being asked to stop: SIGTERM, SIGHUP and the first SIGINT are noted, and honoured at the next safe place."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """On Linux, have the system send this process the signal when its parent dies, so that none is left behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


class Interrupted(BaseException):
    """The run was asked to stop; nothing is wrong. Not an Exception, so that no handler swallows it."""


class Stop:
    """Set by a signal; `check` raises Interrupted once it is. A second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.requested = ""
        self._interrupts = 0

    def install(self, parent: int = 0) -> Stop:
        """Take over the signals, and on Linux ask for SIGTERM when the parent dies; `parent` may have died before."""
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
        self.requested = signal.Signals(number).name

    def check(self) -> None:
        if self.requested:
            raise Interrupted(self.requested)
