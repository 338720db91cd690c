"""lm_eval.json of a run: results of lm-evaluation-harness, item by item. Needs no torch."""

from __future__ import annotations

import math
from pathlib import Path

from referee.verdict.statistics import mean
from runtime import records, run_record
from runtime.files import DamagedFileError
from runtime.records import Count, Record, Share, Text
from runtime.run_record import RunRecord

FILE = "lm_eval.json"
ACCURACY, PERPLEXITY = "mean", "perplexity"  # how a value follows from its items


class Metric(Record, frozen=True):
    """A metric of a task."""

    name: Text  # as the harness names it; a filter of the answers stands after a comma
    value: float
    stderr: float | None = None  # as the harness computes it
    items: tuple[float, ...] = ()  # the value of each item; () where one is not a number

    @property
    def right_or_wrong(self) -> bool:
        """Whether each item is 0 or 1."""
        return bool(self.items) and set(self.items) <= {0.0, 1.0}

    @property
    def kind(self) -> str:
        """How `value` follows from the items: their mean, exp(-mean) (a perplexity), or "" for another way."""
        average = mean(self.items) if self.items else math.nan
        if math.isclose(average, self.value, rel_tol=1e-6, abs_tol=1e-9):
            return ACCURACY
        if -700 < average and math.isclose(math.exp(-average), self.value, rel_tol=1e-6):
            return PERPLEXITY
        return ""


class TaskResult(Record, frozen=True):
    """The results of a task."""

    task: Text
    version: Text  # of the task in the harness
    harness: Text
    questions: Text  # digest of what the task asks, and of its items
    items: Count
    requests: Count  # rows that were scored or continued
    truncated: Count  # rows that were longer than the block size
    number_format: Text  # of the forward passes
    metrics: tuple[Metric, ...]
    chance: Share | None = None  # accuracy of guessing, of a multiple choice

    @property
    def same_questions(self) -> tuple[str, ...]:
        """The key of a comparison item by item: both runs must have it."""
        return (self.task, self.version, self.harness, self.questions)


class LmEvalRecord(Record, frozen=True):
    """The results of a run. weights: SHA-256 of the evaluated weights, of the checkpoint of `iterations`."""

    run: Text
    variant: Text
    seed: int
    iterations: Count
    weights: Text
    tasks: tuple[TaskResult, ...]


def read(run_dir: Path) -> LmEvalRecord | None:
    """Return the record; None where there is none. A damaged one is evaluated again, and `make verify` names it."""
    try:
        return records.read(LmEvalRecord, run_dir / FILE, run_record.owner_at(run_dir))
    except (FileNotFoundError, DamagedFileError, run_record.RecordError):
        return None


def read_final(run_dir: Path, record: RunRecord) -> LmEvalRecord | None:
    """Return the record if it is of the last weights of a finished run."""
    found = read(run_dir)
    ended = record.progress.iterations if record.progress else None
    return found if found and found.run == record.run and found.iterations == ended else None
