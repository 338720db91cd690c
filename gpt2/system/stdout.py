"""Wrap standard output so that a command continues after its reader ends."""

from __future__ import annotations

import errno
import os
from typing import Any, TextIO

CLOSED = (errno.EPIPE, errno.EIO)  # the reader of a pipe ended; the terminal closed


class LastingOutput:
    """Forward writes to `stream`; after the stream closes, discard them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        if error.errno not in CLOSED:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
