"""Print to a terminal: no control character passes, any encoding will do, and a reader that ends does no harm."""

from __future__ import annotations

import codecs
import errno
import os
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

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


if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BAR_COLUMNS = 24
WIDE = 100  # columns of a terminal that has space for a bar
INDENT = "  "
PLAIN_LINES = 4  # most lines in a period, where there is no live terminal

Report = Callable[[str], None]


class LiveLine:
    """Lines of progress between `start` and `stop`, or while the context is open. `say` prints above them.

    key: of a line, where there are several. report prints the plain lines, where the stream is not a terminal or its
    cursor cannot be moved; of many lines at most PLAIN_LINES in plain_seconds.
    """

    def __init__(
        self, plain_seconds: float = 15.0, report: Report | None = None, stream: TextIO | None = None
    ) -> None:
        from rich.console import Console

        stream = stream or getattr(sys.stdout, "unescaped", sys.stdout)
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._plain_seconds, self._report = plain_seconds, report or self.say
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._shown_at: dict[str, float] = {}

    def __enter__(self) -> LiveLine:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, text: str = "", key: str = "") -> None:
        self._shown_at[key] = time.monotonic()
        if self._is_live:
            self._progress = self._progress or self._new_progress()
            self._tasks[key] = self._progress.add_task(self._crop(text), total=1.0)
            self._progress.start()

    def _new_progress(self) -> Progress:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        bar = BarColumn(BAR_COLUMNS, style="bright_black", complete_style="cyan", finished_style="cyan")
        text = TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="crop")
        )
        self._has_bar = self._console.width >= WIDE
        return Progress(
            *([bar, text] if self._has_bar else [text]),
            console=self._console,
            transient=True,
            refresh_per_second=4,
        )

    def update(self, text: str, share: float | None = None, key: str = "") -> None:
        """Show the text. share: finished share of the work, 0 to 1; None where unknown."""
        plain_seconds = self._plain_seconds * max(1.0, len(self._shown_at) / PLAIN_LINES)
        if self._progress and key in self._tasks:
            total, completed = (None, 0.0) if share is None else (1.0, share)
            task = self._tasks[key]
            self._progress.update(task, description=self._crop(text), total=total, completed=completed)
        elif time.monotonic() - self._shown_at[key] >= plain_seconds:
            self._shown_at[key] = time.monotonic()
            self._report(text)

    def _crop(self, text: str) -> str:
        """Leave the last column of the terminal empty, because a sign in it makes some terminals wrap."""
        return printable(text)[: self._console.width - 1 - self._has_bar * (BAR_COLUMNS + 1)]

    def say(self, text: str) -> None:
        """Print text. A terminal breaks it between words; an indented line is a command and stays whole."""
        for line in text.split("\n"):
            self._console.print(printable(line), soft_wrap=not self._is_live or line.startswith(INDENT))

    def stop(self, key: str | None = None) -> None:
        """Erase a live line, by default all."""
        for each in [*self._shown_at] if key is None else [key]:
            self._shown_at.pop(each, None)
            task = self._tasks.pop(each, None)
            if self._progress and task is not None and self._tasks:
                self._progress.remove_task(task)
        if self._progress and not self._tasks:
            self._progress.stop()  # erases the last line, too
            self._progress = None


def duration(seconds: float) -> str:
    """Seconds in the two largest units that matter: '45s', '3m 05s', '2h 10m'."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    return f"{seconds // 3600}h {seconds % 3600 // 60:02d}m"
