"""Progress of a study on the terminal, and the estimate of its remaining time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from referee.verdict.statistics import mean
from runtime import run_record
from runtime.metrics_log import MetricsLine
from runtime.output import INDENT as GAP
from runtime.output import LiveLine, duration
from runtime.run_record import RunRecord
from runtime.settings import EvaluationConfig
from study.hellaswag_scores import TASKS, entry
from study.plan_file import Plan

PLAIN_SECONDS = 15.0
LEAST_PROGRESS = 0.02  # of a run, before its own speed says how long it takes


def short(count: float, unit: str = "") -> str:
    """12345 -> '12.3k': for counts and rates."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.1f}{suffix}{unit}"
    return f"{count:.0f}{unit}"


@dataclass
class _Present:
    """A run that executes: when it began, made its first step, and the finished fractions of it then and now."""

    began: float
    stepped: float | None = None  # None before the first step
    resumed_at: float = 0.0  # made by earlier processes
    done: float = 0.0


class Estimate:
    """Seconds left in the study, from the runs finished in this session, else the speed of the present ones.

    expected_seconds: of a run, until one shows its speed; None where it is unknown. slots: runs at once; 0: as many as
    execute. final: seconds of a run after its last step, relative to those of its steps.
    """

    def __init__(self, runs: int, expected_seconds: float | None, slots: int = 1, final: float = 0.0) -> None:
        self.left, self.slots, self._expected, self._final = runs, slots, expected_seconds, final
        self._present: dict[str, _Present] = {}
        self._finished: list[float] = []

    def begin(self, name: str = "") -> None:
        self._present[name] = _Present(time.monotonic())

    def end(self, name: str = "") -> None:
        self._finished.append(time.monotonic() - self._present.pop(name).began)
        self.left -= 1

    def add(self, seconds: float) -> None:
        """Count the report after the last finished run as a part of it."""
        self._finished[-1] += seconds

    def pause(self, name: str = "") -> None:
        """Leave out a run that waits for its retry."""
        self._present.pop(name)

    def seconds_left(self, done: float = 0.0, name: str = "") -> float | None:
        """Seconds left, or None before there is an estimate. done: finished fraction of the named run's steps."""
        run = self._present[name]
        run.done = done / (1 + self._final)
        if run.stepped is None and done > 0:
            run.resumed_at, run.stepped = run.done, time.monotonic()
        known = self._finished or [
            seconds for one in self._present.values() if (seconds := _whole(one)) is not None
        ]
        each = mean(known) if known else self._expected
        if each is None:
            return None
        here = [one.done for one in self._present.values()]
        return remaining(each, here, max(self.left - len(here), 0), self.slots)


def _whole(run: _Present) -> float | None:
    """Seconds of a whole run with its start, at its speed so far; None before LEAST_PROGRESS."""
    made = run.done - run.resumed_at
    if run.stepped is None or made < LEAST_PROGRESS:
        return None
    return run.stepped - run.began + (time.monotonic() - run.stepped) / made


def remaining(each: float, running: Sequence[float], waiting: float, slots: int = 0) -> float:
    """Seconds until all runs are finished.

    each: seconds of a whole run. running: finished fraction of each run that executes. waiting: the other runs, of
    which one in part counts as that part. slots: runs at once; 0: as many as execute.
    """
    rest = [each * (1 - done) for done in running]
    return max([*rest, (sum(rest) + each * waiting) / (slots or len(rest) or 1)])


@dataclass
class _Line:
    """The line of a run."""

    title: str
    iterations: int  # planned
    validation: str = ""
    step: MetricsLine | None = None  # the last training step


class Terminal:
    """Show the progress of runs: `begin`, any number of `update`, then `end` or `pause`; `say` at any time."""

    def __init__(self, estimate: Estimate, total: int, stream: TextIO | None = None) -> None:
        self._live = LiveLine(PLAIN_SECONDS, stream=stream)
        self.say, self.close = self._live.say, self._live.stop
        self.estimate = estimate
        self._total = total
        self._lines: dict[str, _Line] = {}
        self._notes: set[tuple[str, str]] = set()  # name and message: a resumed run repeats its notes

    def begin(self, name: str, number: int, iterations: int, where: str = "") -> None:
        """iterations: planned. where: slot, host or job."""
        self.estimate.begin(name)
        title = f"[{number}/{self._total}] {name}"
        line = self._lines[name] = _Line(f"{title} ({where})" if where else title, iterations)
        self._live.start(f"{line.title}{GAP}starting", name)

    def update(self, name: str, news: MetricsLine) -> None:
        line = self._lines[name]
        if news.event == "validation":
            line.validation = f"val ppl {digits(news.perplexity)}" if news.perplexity else ""
            if news.accuracy is not None:
                line.validation = f"accuracy {100 * news.accuracy:.1f} %"
        if news.event == "note" and (name, news.message) not in self._notes:
            self._notes.add((name, news.message))
            self.say(f"{line.title}: {news.message}")
        if news.event == "train":
            line.step = news
        if news.event in ("train", "phase"):
            self._show(name, line, news.phase)

    def _show(self, name: str, line: _Line, phase: str) -> None:
        """Show the most important number first, since a narrow terminal crops the line."""
        step = line.step
        done = step.iteration / line.iterations if step else 0.0
        left = self.estimate.seconds_left(done, name)
        reward = step.reward if step else None
        number = f"reward {reward:.3f}" if reward is not None else ""
        if step and step.loss is not None and not number:
            number = f"loss {step.loss:.3f}"
        parts = [line.title, f"{done:4.0%}" if step else "", number, phase]
        parts += [f"study {duration(left)} left"] if left is not None and left >= 1 else []
        parts += [line.validation]
        if step and step.train_seconds > 0 and done > 0:
            parts += [f"run {duration(step.train_seconds / done * (1 - done))} left"]
        if step and step.tokens_per_second:
            parts += [short(step.tokens_per_second, " tok/s")]
        if step and step.memory_bytes:
            parts += [f"{step.memory_bytes / 2**30:.1f} GiB"]
        self._live.update(GAP.join(filter(None, parts)), done, name)

    def end(self, name: str, text: str) -> None:
        self.estimate.end(name)
        self._remove(name, text)

    def pause(self, name: str, text: str) -> None:
        """End the live line of a run that is retried."""
        self.estimate.pause(name)
        self._remove(name, text)

    def _remove(self, name: str, text: str) -> None:
        self._live.stop(name)
        self.say(f"{self._lines.pop(name).title}{GAP}{text}")


def digits(value: float) -> str:
    """Four significant digits, without an exponent where a person would write none."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def last_result(record: RunRecord | None, validation: MetricsLine | None) -> str:
    """Return the perplexity or the accuracy of the last validation; "" before the first one."""
    if validation and validation.accuracy is not None:
        return f"{100 * validation.accuracy:.1f} %"
    last = validation or (record.validation if record else None)
    return f"ppl {digits(last.perplexity)}" if last and last.perplexity else ""


START_SECONDS = 3.0  # of the process of a run, until its first step


FORWARD_SHARE = 1 / 3  # of the seconds of a training token: those of a scored token
# with their four endings: tokens of an item of HellaSwag, about, and of all items of the continuation choice
HELLASWAG_TOKENS, HELLASWAG_ITEMS, CHOICE_TOKENS = 400, 10_042, 30_720


def expected_seconds(plan: Plan, evaluation: EvaluationConfig) -> float | None:
    """Return the seconds of an average run: its start, training and evaluations; None if no steps were timed."""
    found = []
    for name, row in plan.variants.items():
        if (seconds := plan.planned_seconds(name)) is not None:
            during = evaluation.interval_tokens and (row.tokens - 1) // evaluation.interval_tokens
            share = FORWARD_SHARE * during * evaluation.tokens / row.tokens
            found.append(START_SECONDS + seconds * (1 + share + final_share(plan, evaluation)))
    return mean(found) if found else None


def final_share(plan: Plan, evaluation: EvaluationConfig) -> float:
    """Return the seconds of the evaluation after the last step, relative to those of training."""
    items = HELLASWAG_TOKENS * (evaluation.hellaswag_limit or HELLASWAG_ITEMS)
    scored = evaluation.tokens + (items if evaluation.hellaswag else CHOICE_TOKENS)
    return FORWARD_SHARE * scored / mean([row.tokens for row in plan.variants.values()])


def summary(
    plan: Plan, variants: Sequence[str], left: int, runs: int, each: float | None, slots: int = 1
) -> str:
    """Describe the batch, the iterations of each variant, the number of pending runs and of runs at once.

    each: seconds of an average run.
    """
    batch = plan.batch
    iterations = {name: plan.variants[name].iterations for name in variants}
    if len({*iterations.values()}) == 1:
        counts = f"{next(iter(iterations.values()))} for every variant"
    else:
        counts = ", ".join(f"{name} {count}" for name, count in iterations.items())
    ranks = f" x {batch.world_size} ranks" if batch.world_size > 1 else ""
    return (
        f"batch {batch.effective} sequences of {batch.block_size} tokens "
        f"= micro {batch.micro} x accumulation {batch.accumulation}{ranks}; iterations: {counts}\n"
        f"{left} of {runs} runs pending"
        + (f", {slots} at once" if slots > 1 else "")
        + (f", threads of a run: {plan.threads}" if plan.threads else "")
        + (f", about {duration(math.ceil(left / max(slots, 1)) * each)}" if each else "")
    )


def beside_note(slots: int) -> str:
    """Return the note for the report on runs at once; empty for one at a time."""
    if slots < 2:
        return ""
    return (
        f"up to {slots} runs trained at once: the tokens per second and the training seconds of a run were measured "
        "beside other runs; step time ratios were measured before the runs, in turns"
    )


def outcome(run_dir: Path) -> str:
    """Describe a finished run in one line, or the reason why it is not finished."""
    try:
        record = run_record.load(run_dir)
    except run_record.RecordError as error:
        return str(error)
    if record.status != "finished":
        return f"{record.status}: {record.error}"
    validation, progress = record.validation, record.progress
    parts = [f"perplexity {validation.perplexity:.2f}"] if validation and validation.perplexity else []
    for task in TASKS:
        if (score := entry(record, task)) and score.acc is not None:
            spread = "" if score.acc_stderr is None else f" +- {score.acc_stderr:.1%}"
            parts.append(f"{task.name} {score.acc:.1%}{spread}")
    if progress:
        parts.append(f"{short(progress.tokens)} tokens in {duration(progress.train_seconds)} of training")
    if record.throughput and record.throughput.tokens_per_second:
        parts.append(f"{record.throughput.tokens_per_second:,.0f} tok/s")
    if record.memory and record.memory.peak_allocated_bytes is not None:
        parts.append(f"{record.memory.peak_allocated_bytes / 2**30:.2f} GiB")
    return "  ".join(parts)
