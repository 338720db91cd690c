"""Print to a terminal: no control character passes, any encoding will do, and a reader that ends does no harm."""

from __future__ import annotations

import codecs
import errno
import os
import sys
import unicodedata
from pathlib import Path
from typing import Any, TextIO

CLOSED = (errno.EPIPE, errno.EIO)  # the reader of a pipe ended; the terminal closed
ASCII = {"±": "+-", "\u2212": "-", "→": "->", "·": ".", "†": "+", "─": "-", "━": "=", "\u00a0": " "}


def printable(text: str, keep: str = "") -> str:
    """Escape control and direction characters and lone surrogates, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(
        sign
        if sign.isprintable() or sign in keep or unicodedata.category(sign) == "Zs"
        else sign.encode("unicode_escape").decode()
        for sign in text
    )


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Replace what the stream's encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(ASCII.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


codecs.register_error("similar", _replace)


def open_missing() -> None:
    """Open the null device in place of a standard stream that is closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 (open until the end)


class LastingOutput:
    """Forward writes to `stream`, escaped; after the stream closes, discard them.

    unescaped: the same for a writer that escapes its texts and sends control sequences itself.
    """

    def __init__(self, stream: TextIO, escape: bool = True) -> None:
        self._stream, self._escape = stream, escape
        if escape:
            self.unescaped = LastingOutput(stream, escape=False)
            stream.reconfigure(errors="similar")  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(printable(text, keep="\n\t") if self._escape else text)
        except OSError as error:
            self._discard(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        """Discard what follows. OSError, which names the stream, where the reader did not end: the disk is full."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if error.errno not in CLOSED:
            raise OSError(error.errno, error.strerror, self._stream.name) from error
