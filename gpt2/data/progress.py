"""Show the progress of a preparation: a live bar on a terminal, otherwise a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

PLAIN_EVERY_SECONDS = 5.0
BAR_COLUMNS = 24

Report = Callable[[str], None]


class TokenMeter:
    """Show tokens and tokens/s while the context is open.

    report prints the plain lines, where standard output is no terminal or one that cannot move its cursor. On
    other terminals the line is live and is removed at the end.
    """

    def __init__(self, name: str, report: Report, stream: TextIO | None = None) -> None:
        self._name, self._report = name, report
        self._stream = stream
        self._live: Progress | None = None

    def __enter__(self) -> TokenMeter:
        self._began = self._reported = time.monotonic()
        stream = self._stream or sys.stdout
        if stream.isatty():
            self._live = _live_line(stream)
        if self._live:
            self._live.start()
            self._task = self._live.add_task(self._name, total=None, rate="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._began, 1e-9)

    def update(self, tokens: int, share: float | None) -> None:
        """Show the tokens so far. share: finished share of the work, 0 to 1; None where unknown."""
        rate = format_rate(tokens, self.seconds)
        if self._live:
            total = None if share is None else 1.0
            self._live.update(self._task, completed=min(share or 0.0, 1.0), total=total, rate=rate)
        elif time.monotonic() - self._reported >= PLAIN_EVERY_SECONDS:
            self._reported = time.monotonic()
            self._report(f"{self._name}: {rate}")


def format_rate(tokens: int, seconds: float, of: str = "") -> str:
    """Return "1.5M tokens, 0.30M tokens/s". of: text after "tokens"."""
    return f"{tokens / 1e6:.1f}M tokens{of}, {tokens / seconds / 1e6:.2f}M tokens/s"


def _live_line(stream: TextIO) -> Progress | None:
    """Return the live line, or None where the terminal cannot show one."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column

    console = Console(file=stream, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    return Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(BAR_COLUMNS, style="bright_black", complete_style="cyan", finished_style="cyan"),
        TaskProgressColumn("{task.percentage:>3.0f}%", style="none"),
        TextColumn("{task.fields[rate]}", style="none", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        refresh_per_second=4,
    )
