"""Progress of a study on the terminal, and the estimate of its remaining time."""

from __future__ import annotations

import time
from typing import TextIO

from gpt2.system.progress import INDENT as GAP
from gpt2.system.progress import LiveLine, duration
from study.executors.child_process import Event

PLAIN_SECONDS = 15.0
LEAST_PROGRESS = 0.02  # of a run, before its own speed says how long it takes


def short(count: float, unit: str = "") -> str:
    """12345 -> '12.3k': for counts and rates."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.1f}{suffix}{unit}"
    return f"{count:.0f}{unit}"


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


class Terminal:
    """Show the progress of runs: `begin`, any number of `update`, then `end` or `pause`; `say` at any time."""

    def __init__(self, estimate: Estimate, total: int, stream: TextIO | None = None) -> None:
        self._line = LiveLine(PLAIN_SECONDS, stream=stream)
        self.say, self.close = self._line.say, self._line.stop
        self.estimate = estimate
        self._total = total
        self._name = self._validation = ""
        self._step: Event | None = None  # the last training step

    def begin(self, name: str, number: int) -> None:
        self.estimate.begin()
        self._name, self._validation, self._step = f"[{number}/{self._total}] {name}", "", None
        self._line.start(f"{self._name}{GAP}starting")

    def update(self, event: Event) -> None:
        if event.event == "validation":
            self._validation = f"val ppl {digits(event.perplexity)}" if event.perplexity else ""
        if event.event == "note":
            self.say(f"{self._name}: {event.message}")
        if event.event == "train":
            self._step = event
        if event.event in ("train", "phase"):
            self._show(event.phase)

    def _show(self, phase: str) -> None:
        """Show the most important number first, since a narrow terminal crops the line."""
        step = self._step
        done = step.iteration / step.iterations if step else 0.0
        left = self.estimate.seconds_left(done)
        parts = [self._name, f"{done:4.0%}{GAP}loss {step.loss:.3f}" if step else "", phase]
        parts += [f"study {duration(left)} left"] if left is not None and left >= 1 else []
        parts += [self._validation]
        if step and step.train_seconds > 0:
            parts += [f"run {duration(step.train_seconds / done * (1 - done))} left"]
        if step and step.tokens_per_second:
            parts += [short(step.tokens_per_second, " tok/s")]
        if step and step.memory_bytes:
            parts += [f"{step.memory_bytes / 2**30:.1f} GiB"]
        self._line.update(GAP.join(filter(None, parts)), done)

    def end(self, text: str) -> None:
        self.estimate.end()
        self.pause(text)

    def pause(self, text: str) -> None:
        """End the live line of a run that is retried at once."""
        self.close()
        self.say(f"{self._name}{GAP}{text}")


def digits(value: float) -> str:
    """Four significant digits, without an exponent where a person would write none."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
