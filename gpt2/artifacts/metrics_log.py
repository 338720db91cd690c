"""Log a run: run.json, metrics.jsonl, and one JSON object per line on standard output."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from gpt2.artifacts import run_record
from gpt2.artifacts.typed_json import to_plain
from gpt2.system import files

NOT_METRICS = ("started", "phase")  # events without numbers, not written to metrics.jsonl
PRINT_SECONDS = 0.25  # least time between two lines on standard output; metrics.jsonl gets every line


class MetricsLog:
    """Log of a run in `directory`. Enter it to write metrics.jsonl, too. record: plain data of run.json."""

    def __init__(self, directory: Path, opening: run_record.RunRecord, iterations: int) -> None:
        self.directory, self.iterations = directory, iterations
        self.record = opening.to_json()
        self.notes: list[str] = []
        self._metrics: TextIO | None = None
        self._printed_at = 0.0

    def __enter__(self) -> MetricsLog:
        self._metrics = (self.directory / "metrics.jsonl").open("a")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._metrics:
            self._metrics.close()

    def log(self, line: dict[str, Any], always: bool = False) -> None:
        """Append the line to metrics.jsonl; print it, unless a line was printed less than PRINT_SECONDS ago."""
        if line["event"] not in NOT_METRICS and self._metrics and not self._metrics.closed:
            run_record.append_metrics(self._metrics, line)
        now = time.monotonic()
        if always or now - self._printed_at >= PRINT_SECONDS:
            self._printed_at = now
            print_event(line | {"iterations": self.iterations})

    def note(self, iteration: int, message: str) -> None:
        """Add a note for the report."""
        self.notes.append(message)
        self.log({"event": "note", "iteration": iteration, "message": message}, always=True)

    def write(self, status: str, error: str | None, entries: dict[str, Any]) -> None:
        """Write run.json with these entries."""
        self.record |= {"status": status, "error": error, "notes": self.notes} | entries
        record = run_record.from_json(files.finite(to_plain(self.record)))
        files.write_json(self.directory / "run.json", record.to_json())

    def speeds(self) -> list[float]:
        """Return the tokens per second of every logged step, over all processes of the run."""
        lines = map(json.loads, (self.directory / "metrics.jsonl").read_text().splitlines())
        return [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]

    def last_record(self) -> run_record.RunRecord | None:
        """Return the record of an earlier process of this run; None if there is none that is readable."""
        try:
            return run_record.load(self.directory)
        except run_record.RecordError:
            return None


def truncate_metrics(path: Path, iteration: int, evaluated: Sequence[int] = ()) -> None:
    """Drop torn lines of metrics.jsonl and those that will be written again after resuming.

    These are lines after `iteration`, and validations at tokens other than `evaluated`.
    """
    if not path.exists():
        return
    kept = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if not isinstance(line, dict) or line.get("iteration", 0) > iteration:
            continue
        if line.get("event") != "validation" or line.get("tokens") in evaluated:
            kept.append(text)
    files.write_text(path, "".join(text + "\n" for text in kept))


def print_event(line: dict[str, Any]) -> None:
    """Print one JSON line for the parent process. A closed pipe is not an error."""
    try:
        print(json.dumps(line), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
