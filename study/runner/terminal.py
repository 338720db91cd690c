"""Progress of a study in the terminal: on a TTY one live line, which never wraps; plain lines otherwise."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from study.runner.child_process import Event

PLAIN_EVERY_SECONDS = 15.0
LEAST_PROGRESS = 0.02  # of a run, before its own speed says how long it takes
BAR_WIDTH = (6, 24)  # columns; a terminal too narrow for the first has none
TEXT_WIDTH = 80  # columns that the texts get before the bar does
GAP = "  "

# A piece of the live line and its rank: where the line is too long, the highest rank is omitted first.
Part = tuple[str, int]


def short(count: float, unit: str = "") -> str:
    """12345 -> '12.3k': for counts and rates."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.1f}{suffix}{unit}"
    return f"{count:.0f}{unit}"


def duration(seconds: float) -> str:
    """Seconds in the two largest units that matter: '45s', '3m 05s', '2h 10m'."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    return f"{seconds // 3600}h {seconds % 3600 // 60:02d}m"


def fitting(parts: Sequence[Part], width: int) -> list[str]:
    """Return the parts that fit side by side, in their order; the last one left is shortened to fit."""
    kept = list(parts)
    while len(kept) > 1 and len(GAP.join(text for text, _ in kept)) > width:
        kept.remove(max(kept, key=lambda part: part[1]))
    return [text[:width] for text, _ in kept]


def wrapped(text: str, width: int) -> str:
    """Break lines between words and indent the rest. An indented line is a command: it stays whole, for copying."""
    lines = []
    for line in text.split("\n"):
        whole = len(line) <= width or line.startswith(GAP)
        lines += (
            [line]
            if whole
            else textwrap.wrap(
                line,
                max(width, 20),
                subsequent_indent=2 * GAP,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines)


class Estimate:
    """Seconds left in the study, from the runs finished in this session and the progress of the present one.

    expected_seconds: of a run, until one is finished; None where it is unknown.
    """

    def __init__(self, runs: int, expected_seconds: float | None) -> None:
        self.left = runs
        self._expected = expected_seconds
        self._began = time.monotonic()
        self._resumed_at: float | None = None  # fraction of the run that earlier processes made
        self._finished: list[float] = []

    def begin(self) -> None:
        self._began, self._resumed_at = time.monotonic(), None

    def end(self) -> None:
        self._finished.append(time.monotonic() - self._began)
        self.left -= 1

    def seconds_left(self, done: float = 0.0) -> float | None:
        """Seconds left, or None before there is an estimate. done: finished fraction of the present run."""
        if self._resumed_at is None and done > 0:
            self._resumed_at = done
        spent, made = time.monotonic() - self._began, done - (self._resumed_at or 0.0)
        whole = spent / made if made >= LEAST_PROGRESS else None
        each = sum(self._finished) / len(self._finished) if self._finished else self._expected or whole
        if each is None:
            return None
        here = max(
            each * (1.0 - (self._resumed_at or 0.0)) - spent, whole * (1.0 - done) if whole else 0.0, 0.0
        )
        return here + each * max(self.left - 1, 0)


class LiveLine:
    """One line as wide as the terminal is now: parts, and a bar where there is space for one."""

    def __init__(self, name: str) -> None:
        self.done = 0.0
        self.parts: list[Part] = [(name, 0)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - 1  # the last column makes some terminals wrap
        least, most = BAR_WIDTH
        bar = min(most, (width - TEXT_WIDTH) // 2)  # depends on the terminal's width alone, so nothing jumps
        bar = bar if bar >= least else 0
        name, *rest = fitting(self.parts, width - bar - len(GAP) * bool(bar))
        line = Text(name, no_wrap=True, overflow="crop")
        if bar:
            full = round(bar * min(self.done, 1.0))
            line.append(GAP).append("━" * full, "cyan").append("━" * (bar - full), "bright_black")
        yield line.append("".join(GAP + text for text in rest))


class Terminal:
    """Show the progress of runs: `begin`, any number of `update`, then `end` or `pause`; `say` at any time."""

    def __init__(self, estimate: Estimate, total: int, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._on_tty = self._console.is_terminal and not self._console.is_dumb_terminal
        self.estimate = estimate
        self._total = total
        self._live: Live | None = None
        self._line = LiveLine("")
        self._name = ""
        self._numbers: list[Part] = []  # of the last training step shown
        self._validation = ""
        self._shown_at = 0.0

    def say(self, text: str) -> None:
        if self._on_tty:
            text = wrapped(text, self._console.width)
        self._console.print(text, markup=False)

    def begin(self, name: str, number: int) -> None:
        self.estimate.begin()
        self._name, self._validation, self._numbers = f"[{number}/{self._total}] {name}", "", []
        self._shown_at = time.monotonic()
        self._line = LiveLine(self._name)
        self._show([("starting", 1)])
        if self._on_tty:
            self._live = Live(self._line, console=self._console, transient=True, refresh_per_second=4)
            self._live.start()

    def update(self, event: Event) -> None:
        if event.event == "validation":
            self._validation = f"val ppl {digits(event.perplexity)}" if event.perplexity else ""
        if event.event == "note":
            self.say(f"{self._name}: {event.message}")
        if event.event == "phase":
            self._show([*self._numbers, (event.phase, 1), *self._study_left()])
        if event.event == "train":
            self._line.done = done = event.iteration / event.iterations
            self._numbers = self._training(event)
            seconds = event.train_seconds / done * (1 - done)
            left = [(f"run {duration(seconds)} left", 5)] if event.train_seconds > 0 else []
            self._show([*self._numbers, *left, *self._study_left()])

    def _training(self, event: Event) -> list[Part]:
        parts = [(f"{self._line.done:4.0%}", 1), (f"loss {event.loss:.3f}", 2)]
        if self._validation:
            parts.append((self._validation, 4))
        if event.tokens_per_second:
            parts.append((short(event.tokens_per_second, " tok/s"), 6))
        if event.memory_bytes:
            parts.append((f"{event.memory_bytes / 2**30:.1f} GiB", 7))
        return parts

    def _study_left(self) -> list[Part]:
        seconds = self.estimate.seconds_left(self._line.done)
        return [] if seconds is None or seconds < 1 else [(f"study {duration(seconds)} left", 3)]

    def _show(self, parts: list[Part]) -> None:
        self._line.parts = [(self._name, 0), *parts]
        if not self._on_tty and time.monotonic() - self._shown_at >= PLAIN_EVERY_SECONDS:
            self._shown_at = time.monotonic()
            self.say(GAP.join(text for text, _ in self._line.parts))

    def end(self, text: str) -> None:
        self.estimate.end()
        self.pause(text)

    def pause(self, text: str) -> None:
        """End the live line of a run that is retried at once."""
        self.close()
        self.say(f"{self._name}{GAP}{text}")

    def close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None


def digits(value: float) -> str:
    """Four significant digits, without an exponent where a person would write none."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
