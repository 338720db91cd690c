"""What a run writes down and tells: run.json, metrics.jsonl, and a JSON object a line on standard output."""

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

NOT_METRICS = ("started", "phase")  # these events are no numbers and not for metrics.jsonl
PRINT_SECONDS = 0.25  # between two lines of training for the terminal; metrics.jsonl gets every one


class MetricsLog:
    """The written side of a run in `directory`. Open it (as a context) to have metrics.jsonl written as well."""

    def __init__(self, directory: Path, opening: run_record.RunRecord, iterations: int) -> None:
        self.directory, self.iterations = directory, iterations
        self.record = opening.to_json()
        self.notes: list[str] = []
        self._metrics: TextIO | None = None
        self._told_at = 0.0

    def __enter__(self) -> MetricsLog:
        self._metrics = (self.directory / "metrics.jsonl").open("a")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._metrics:
            self._metrics.close()

    def tell(self, line: dict[str, Any], always: bool = False) -> None:
        """Every number goes to metrics.jsonl; whoever listens hears at most four lines a second."""
        if line["event"] not in NOT_METRICS and self._metrics and not self._metrics.closed:
            run_record.append_metrics(self._metrics, line)
        now = time.monotonic()
        if always or now - self._told_at >= PRINT_SECONDS:
            self._told_at = now
            print_event(line | {"iterations": self.iterations})

    def note(self, iteration: int, message: str) -> None:
        """Something that the reader of the report must know."""
        self.notes.append(message)
        self.tell({"event": "note", "iteration": iteration, "message": message}, always=True)

    def write(self, status: str, error: str | None, entries: dict[str, Any]) -> None:
        """Bring run.json up to date."""
        self.record |= {"status": status, "error": error, "notes": self.notes} | entries
        record = run_record.from_json(files.finite(to_plain(self.record)))
        files.write_json(self.directory / "run.json", record.to_json())

    def speeds(self) -> list[float]:
        """Tokens per second of every step on record, of all processes of the run."""
        lines = map(json.loads, (self.directory / "metrics.jsonl").read_text().splitlines())
        return [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]

    def last_record(self) -> run_record.RunRecord | None:
        """What an earlier process of this run left; None where there is nothing readable."""
        try:
            return run_record.load(self.directory)
        except run_record.RecordError:
            return None


def truncate_metrics(path: Path, iteration: int, evaluated: Sequence[int] = ()) -> None:
    """Drop the lines of metrics.jsonl that will be made again, or are torn.

    Those are the lines after `iteration`, and validations at other tokens than `evaluated`.
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
    """One JSON line for whoever started this process; nobody may be listening any more."""
    try:
        print(json.dumps(line), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
