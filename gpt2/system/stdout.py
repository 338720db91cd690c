"""Standard output that may go away without taking the study with it."""

from __future__ import annotations

import errno
import os
from typing import Any, TextIO

GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe ended; the terminal was closed


class LastingOutput:
    """Passes everything on to `stream`; once nobody reads it any more, what is written goes nowhere.

    A study that was started in a terminal, or whose output is piped into a viewer, is worth more than its output.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._gone(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._gone(error)

    def _gone(self, error: OSError) -> None:
        if error.errno not in GONE:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
