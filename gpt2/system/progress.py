"""Show progress: a live line on a terminal, which never wraps; otherwise a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from gpt2.system.stdout import printable

if TYPE_CHECKING:
    from rich.progress import Progress

BAR_COLUMNS = 24
WIDE = 100  # columns of a terminal that has space for a bar
INDENT = "  "

Report = Callable[[str], None]


class LiveLine:
    """One line of progress between `start` and `stop`, or while the context is open. `say` prints above it.

    report prints the plain lines, where the stream is no terminal or one that cannot move its cursor.
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

    def __enter__(self) -> LiveLine:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, text: str = "") -> None:
        self._shown_at = time.monotonic()
        if self._is_live:
            self._progress = self._new_progress()
            self._task = self._progress.add_task(self._crop(text), total=1.0)
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

    def update(self, text: str, share: float | None = None) -> None:
        """Show the text. share: finished share of the work, 0 to 1; None where unknown."""
        if self._progress:
            total, completed = (None, 0.0) if share is None else (1.0, share)
            self._progress.update(self._task, description=self._crop(text), total=total, completed=completed)
        elif time.monotonic() - self._shown_at >= self._plain_seconds:
            self._shown_at = time.monotonic()
            self._report(text)

    def _crop(self, text: str) -> str:
        """Leave the last column of the terminal empty, because a sign in it makes some terminals wrap."""
        return printable(text)[: self._console.width - 1 - self._has_bar * (BAR_COLUMNS + 1)]

    def say(self, text: str) -> None:
        """Print text. A terminal breaks it between words; an indented line is a command and stays whole."""
        for line in text.split("\n"):
            self._console.print(printable(line), soft_wrap=not self._is_live or line.startswith(INDENT))

    def stop(self) -> None:
        """Erase the live line."""
        if self._progress:
            self._progress.stop()
            self._progress = None


def duration(seconds: float) -> str:
    """Seconds in the two largest units that matter: '45s', '3m 05s', '2h 10m'."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    return f"{seconds // 3600}h {seconds % 3600 // 60:02d}m"
