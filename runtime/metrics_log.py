"""Log a run: run.json, and metrics.jsonl, from which the study, its pages and the trackers read its progress."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec

from runtime import files, ranks, run_record
from runtime.files import DamagedFileError, read_bytes
from runtime.records import Amount, Count, Positive, Record, Text, to_plain

T = TypeVar("T")
SIZE_LIMIT = 4 * 2**30  # bytes of metrics.jsonl
TAIL_BYTES = 8192  # of metrics.jsonl, more than ten lines


class MetricsLine(msgspec.Struct, frozen=True):
    """What the progress of a run needs of a line of metrics.jsonl.

    event: "train", "validation", "phase", "note" or "spike". loss: in nats.
    """

    event: Text
    iteration: Count = 0
    tokens: Count = 0
    train_seconds: Amount = 0.0
    loss: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None  # of GRPO, as the reward
    reward: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: int | None = None
    phase: str = ""
    message: str = ""


class Step(msgspec.Struct, frozen=True):
    """A line of metrics.jsonl after an optimizer step. loss: in nats. logp_diff: of GRPO, rollout minus training."""

    iteration: Positive
    tokens: Positive
    train_seconds: Amount
    loss: float
    tokens_per_second: float | None = None
    grad_norm: float | None = None
    logp_diff: float | None = None
    logp_diff_absolute: float | None = None


class MetricsLog:
    """Log of a run in `directory`. Enter it to write metrics.jsonl, too. record: plain data of run.json.

    Of several ranks, only the first writes. fence: called before a line is written.
    """

    def __init__(
        self, directory: Path, opening: run_record.RunRecord, fence: Callable[[], None] = lambda: None
    ) -> None:
        self.directory, self.fence = directory, fence
        self.owner = run_record.owner(opening)
        self.record = opening.to_json()
        self.notes: list[str] = []
        self._metrics: TextIO | None = None

    def __enter__(self) -> MetricsLog:
        if ranks.first():
            self._metrics = files.open_append(self.directory / "metrics.jsonl")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._metrics:
            self._metrics.close()

    def log(self, line: dict[str, Any]) -> None:
        """Append the line to metrics.jsonl."""
        if self._metrics and not self._metrics.closed:
            self.fence()
            append_metrics(self._metrics, line)

    def phase(self, phase: str) -> None:
        """Log the work that begins."""
        self.log({"event": "phase", "phase": phase})

    def note(self, iteration: int, message: str) -> None:
        """Add a note for the report."""
        self.notes.append(message)
        self.log({"event": "note", "iteration": iteration, "message": message})

    def write(self, status: str, error: str | None, entries: dict[str, Any]) -> None:
        """Write run.json with these entries."""
        self.record |= {"status": status, "error": error, "notes": self.notes} | entries
        if ranks.first():
            run_record.write(self.directory, run_record.from_json(to_plain(self.record)))

    def saved_sum(self) -> MetricsSum:
        """Flush metrics.jsonl to the disk; return its length and its SHA-256."""
        path = self.directory / "metrics.jsonl"
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            os.fsync(file.fileno())
        return metrics_sum(path)

    def speeds(self) -> list[float]:
        """Return the tokens per second of every logged step, over all processes of the run."""
        steps = read_steps(self.directory / "metrics.jsonl")
        return [step.tokens_per_second for step in steps if step.tokens_per_second]

    def last_record(self) -> run_record.RunRecord | None:
        """Return the record of an earlier process of this run; None if there is none that is readable."""
        try:
            return run_record.load(self.directory)
        except run_record.RecordError:
            return None


def read_steps(path: Path) -> tuple[Step, ...]:
    """Read the training steps in a metrics.jsonl. A missing file and one that cannot be read have none."""
    try:
        texts = read_bytes(path, SIZE_LIMIT).splitlines()
    except (FileNotFoundError, DamagedFileError):
        return ()
    lines = [(text, parse_line(text, MetricsLine)) for text in texts]
    steps = [parse_line(text, Step) for text, line in lines if line and line.event == "train"]
    return tuple(step for step in steps if step)


def parse_line(text: bytes, kind: type[T]) -> T | None:
    """Return a line of metrics.jsonl; None for one that is torn or damaged. Keys that `kind` lacks are left out."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


class LogReader:
    """Reads the lines of a metrics.jsonl as they are written. One that a resumed run replaced is read again.

    at_end: whether what is there now is left out.
    """

    def __init__(self, path: Path, at_end: bool = False) -> None:
        self.path = path
        self._file, self._offset = 0, 0  # inode, and bytes read
        if at_end and path.is_file():
            status = path.stat()
            self._file, self._offset = status.st_ino, status.st_size

    def read(self, most: int = SIZE_LIMIT) -> list[bytes]:
        """Return the complete lines that are new, of `most` bytes at the end of the file."""
        try:
            with files.open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._file or status.st_size < self._offset:
                    self._file, self._offset = status.st_ino, 0
                start = max(self._offset, status.st_size - most)
                file.seek(start)
                content = file.read(status.st_size - start)
        except (OSError, DamagedFileError):
            return []
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()[start > self._offset :]  # the first one can lack its beginning
        self._offset = start + len(whole)
        return lines

    def lines(self) -> list[MetricsLine]:
        """Return what is new at the end of the file, damaged lines left out."""
        return [line for text in self.read(TAIL_BYTES) if (line := parse_line(text, MetricsLine))]


def last_lines(run_dir: Path) -> dict[str, MetricsLine]:
    """Return the last line of each event, of those at the end of metrics.jsonl."""
    return {line.event: line for line in LogReader(run_dir / "metrics.jsonl").lines()}


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
        line = parse_line(text, MetricsLine)
        if not line or line.iteration > iteration or line.event == "phase":
            continue
        if line.event != "validation" or line.tokens in evaluated:
            kept.append(text + b"\n")
    files.write_bytes(path, b"".join(kept))


def append_metrics(file: TextIO, line: dict[str, Any]) -> None:
    """Append one JSON object as a line and flush it, so that a killed run loses none."""
    file.write(json.dumps(files.json_data(line), allow_nan=False) + "\n")
    file.flush()
