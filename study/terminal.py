"""What the terminal shows while a study runs: one live line with rich on a TTY, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

PLAIN_EVERY_SECONDS = 15.0


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


class Estimate:
    """Seconds left in the study, from the runs done in this session and the progress of the present one."""

    def __init__(self, runs: int, expected_seconds: float) -> None:
        self.left = runs
        self._expected = expected_seconds
        self._began = time.monotonic()
        self._finished: list[float] = []

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        self._finished.append(time.monotonic() - self._began)
        self.left -= 1

    def seconds_left(self) -> float:
        each = sum(self._finished) / len(self._finished) if self._finished else self._expected
        return max(each - (time.monotonic() - self._began), 0.0) + each * max(self.left - 1, 0)


class Terminal:
    """Tell the progress of runs. `begin`, any number of `update`, `end`; `say` at any time."""

    def __init__(self, estimate: Estimate, total: int, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._live = self._console.is_terminal
        self.estimate = estimate
        self._total = total
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._name = ""
        self._validation = ""
        self._told_at = 0.0

    def say(self, text: str) -> None:
        console = self._progress.console if self._progress else self._console
        console.print(text, markup=False)

    def begin(self, name: str, number: int, iterations: int) -> None:
        self.estimate.begin()
        self._name, self._validation = f"[{number}/{self._total}] {name}", ""
        self._told_at = time.monotonic()
        if self._live:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[told]}", markup=False),
                console=self._console,
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task(self._name, total=iterations, told="starting")

    def update(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "validation":
            self._validation = f"val ppl {event['perplexity']:.1f}" if event.get("perplexity") else ""
        if kind == "note":
            self.say(f"{self._name}: {event['message']}")
        if kind == "phase":
            self._show(str(event["phase"]), None)
        if kind == "train":
            self._show(self._training(event), event["iteration"])

    def _training(self, event: dict[str, Any]) -> str:
        done = event["iteration"] / event["iterations"]
        parts = [f"{done:4.0%}", f"loss {event['loss']:.3f}"]
        if event.get("tokens_per_second"):
            parts.append(short(event["tokens_per_second"], " tok/s"))
        if event.get("memory_bytes"):
            parts.append(f"{event['memory_bytes'] / 2**30:.1f} GiB")
        if done > 0 and event["train_seconds"] > 0:
            parts.append(f"{duration(event['train_seconds'] / done * (1 - done))} of training left")
        if self._validation:
            parts.append(self._validation)
        return "  ".join([*parts, f"study {duration(self.estimate.seconds_left())}"])

    def _show(self, text: str, completed: int | None) -> None:
        if self._progress and self._task is not None:
            self._progress.update(self._task, completed=completed, told=text)
        elif time.monotonic() - self._told_at >= PLAIN_EVERY_SECONDS:
            self._told_at = time.monotonic()
            self.say(f"{self._name}  {text}")

    def end(self, text: str) -> None:
        self.estimate.end()
        self.close()
        self.say(f"{self._name}  {text}")

    def close(self) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None
