"""Log a run: run.json, metrics.jsonl, and one JSON object per line on standard output."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

from runtime import files, ranks, run_record
from runtime.files import DamagedFileError, parse_json, read_bytes
from runtime.records import Amount, Count, InvalidJsonError, Positive, Record, Text, parse, to_plain

NOT_METRICS = ("started", "phase")  # events without numbers, not written to metrics.jsonl
T = TypeVar("T")
SIZE_LIMIT = 4 * 2**30  # bytes of metrics.jsonl
PRINT_SECONDS = 0.25  # least time between two lines on standard output; metrics.jsonl gets every line


@dataclass(frozen=True)
class Line:
    """A line of metrics.jsonl: the keys of every event."""

    event: Text
    iteration: Count = 0
    tokens: Count = 0


@dataclass(frozen=True)
class Step:
    """A line of metrics.jsonl after an optimizer step. loss: in nats. logp_diff: of GRPO, rollout minus training."""

    iteration: Positive
    tokens: Positive
    train_seconds: Amount
    loss: float
    tokens_per_second: float | None = None
    grad_norm: float | None = None
    logp_diff: float | None = None
    logp_diff_absolute: float | None = None


@dataclass(frozen=True)
class LoggedSteps:
    """The steps in a metrics.jsonl, and the number of its damaged lines."""

    steps: tuple[Step, ...] = ()
    damaged: int = 0


class MetricsLog:
    """Log of a run in `directory`. Enter it to write metrics.jsonl, too. record: plain data of run.json.

    Of several ranks, only the first writes and prints.
    """

    def __init__(self, directory: Path, opening: run_record.RunRecord, iterations: int) -> None:
        self.directory, self.iterations = directory, iterations
        self.owner = run_record.owner(opening)
        self.record = opening.to_json()
        self.notes: list[str] = []
        self._metrics: TextIO | None = None
        self._printed_at = 0.0

    def __enter__(self) -> MetricsLog:
        if ranks.first():
            self._metrics = files.open_append(self.directory / "metrics.jsonl")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._metrics:
            self._metrics.close()

    def log(self, line: dict[str, Any], always: bool = False) -> None:
        """Append the line to metrics.jsonl; print it, unless a line was printed less than PRINT_SECONDS ago."""
        if not ranks.first():
            return
        if line["event"] not in NOT_METRICS and self._metrics and not self._metrics.closed:
            append_metrics(self._metrics, line)
        now = time.monotonic()
        if always or now - self._printed_at >= PRINT_SECONDS:
            self._printed_at = now
            print_event(line | {"iterations": self.iterations})

    def phase(self, phase: str) -> None:
        """Print the work that begins."""
        self.log({"event": "phase", "phase": phase}, always=True)

    def note(self, iteration: int, message: str) -> None:
        """Add a note for the report."""
        self.notes.append(message)
        self.log({"event": "note", "iteration": iteration, "message": message}, always=True)

    def write(self, status: str, error: str | None, entries: dict[str, Any]) -> None:
        """Write run.json with these entries."""
        self.record |= {"status": status, "error": error, "notes": self.notes} | entries
        if ranks.first():
            run_record.write(self.directory, run_record.from_json(files.finite(to_plain(self.record))))

    def saved_sum(self) -> MetricsSum:
        """Flush metrics.jsonl to the disk; return its length and its SHA-256."""
        path = self.directory / "metrics.jsonl"
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            os.fsync(file.fileno())
        return metrics_sum(path)

    def speeds(self) -> list[float]:
        """Return the tokens per second of every logged step, over all processes of the run."""
        steps = read_steps(self.directory / "metrics.jsonl").steps
        return [step.tokens_per_second for step in steps if step.tokens_per_second]

    def last_record(self) -> run_record.RunRecord | None:
        """Return the record of an earlier process of this run; None if there is none that is readable."""
        try:
            return run_record.load(self.directory)
        except run_record.RecordError:
            return None


def _select(kind: type[T], content: Any) -> T:
    """Return the keys of `kind` in a line of metrics.jsonl. InvalidJsonError for any other value."""
    if isinstance(content, dict):
        hint: Any = kind  # a type is hashable, which the cache needs
        content = {name: content[name] for name in _names(hint) if name in content}
    return parse(kind, content, "line")


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def read_steps(path: Path, most: int | None = None) -> LoggedSteps:
    """Read the training steps in a metrics.jsonl. A missing file and one that cannot be read have none.

    most: lines to parse, evenly spread over the file; by default all.
    """
    try:
        texts = read_bytes(path, SIZE_LIMIT).splitlines()
    except (FileNotFoundError, DamagedFileError):
        return LoggedSteps()
    steps, damaged = [], 0
    for text in texts[:: max(1, len(texts) // most) if most else 1]:
        try:
            content = parse_json(text, path)
            if _select(Line, content).event == "train":
                steps.append(_select(Step, content))
        except (DamagedFileError, InvalidJsonError):
            damaged += 1
    return LoggedSteps(tuple(steps), damaged)


class MetricsSum(Record, frozen=True):
    """The length and the SHA-256 of metrics.jsonl when a checkpoint was written."""

    bytes: Count
    sha256: str


def metrics_sum(path: Path, length: int | None = None) -> MetricsSum:
    """Return the length and the SHA-256 of the first `length` bytes of the file, by default of all."""
    content = read_bytes(path, SIZE_LIMIT)[:length] if path.exists() else b""
    return MetricsSum(len(content), hashlib.sha256(content).hexdigest())


def truncate_metrics(path: Path, iteration: int, evaluated: Sequence[int] = ()) -> None:
    """Drop torn lines of metrics.jsonl and those that will be written again after resuming.

    These are lines after `iteration`, and validations at tokens other than `evaluated`.
    """
    try:
        texts = read_bytes(path, SIZE_LIMIT).splitlines()
    except FileNotFoundError:
        return
    except DamagedFileError:
        files.quarantine(path)
        return
    kept = []
    for text in texts:
        with contextlib.suppress(DamagedFileError, InvalidJsonError):
            line = _select(Line, parse_json(text, path))
            if line.iteration <= iteration and (line.event != "validation" or line.tokens in evaluated):
                kept.append(text + b"\n")
    files.write_bytes(path, b"".join(kept))


def append_metrics(file: TextIO, line: dict[str, Any]) -> None:
    """Append one JSON object as a line and flush it, so that a killed run loses none."""
    file.write(json.dumps(files.finite(line), allow_nan=False) + "\n")
    file.flush()


def print_event(line: dict[str, Any]) -> None:
    """Print one JSON line for the parent process. A closed pipe is not an error."""
    try:
        print(json.dumps(line), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
