"""lm_eval.json of a run: results of lm-evaluation-harness, item by item. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from referee.verdict.statistics import mean
from runtime.files import DamagedFileError
from runtime.run_record import RunRecord
from runtime.seal import read_sealed, write_sealed
from runtime.typed_json import Count, InvalidJsonError, JsonObject, Missing, Share, Text, parse

FILE = "lm_eval.json"
ACCURACY, PERPLEXITY = "mean", "perplexity"  # how a value follows from its items


@dataclass(frozen=True)
class Metric(JsonObject):
    """A metric of a task. filter: of the answers, "none" where the task has none. stderr: as the harness computes it.

    right: one character an item, 0 or 1, where all items are so. items: otherwise the value of each item, such as a
    log-likelihood in nats. None where an item is not a number.
    """

    name: Text
    filter: Text
    value: float
    higher_is_better: bool
    stderr: Missing[float] = None
    right: Missing[Text] = None
    items: Missing[tuple[float, ...]] = None

    @property
    def values(self) -> list[float]:
        """The value of each item; [] where they were not kept."""
        return [float(mark) for mark in self.right] if self.right else list(self.items or ())

    @property
    def kind(self) -> str:
        """How `value` follows from the items: their mean, exp(-mean) (a perplexity), or "" for another way."""
        values = self.values
        if not values:
            return ""
        average = mean(values)
        if math.isclose(average, self.value, rel_tol=1e-6, abs_tol=1e-9):
            return ACCURACY
        if -700 < average and math.isclose(math.exp(-average), self.value, rel_tol=1e-6):
            return PERPLEXITY
        return ""


@dataclass(frozen=True)
class TaskResult(JsonObject):
    """A task. version: of the task in the harness. definition, items_sha256: digests of questions and of items.

    items: their number. requests: rows that were scored or continued. truncated: rows that were longer than the block
    size. number_format: of the forward passes. chance: accuracy of guessing, of a multiple choice.
    """

    task: Text
    version: Text
    harness: Text
    definition: Text
    items_sha256: Text
    items: Count
    requests: Count
    truncated: Count
    number_format: Text
    device: Text
    torch: Text
    seconds: float
    metrics: tuple[Metric, ...]
    chance: Missing[Share] = None

    @property
    def identity(self) -> tuple[str, ...]:
        """The key of an evaluation: equal keys are the same evaluation."""
        return (self.task, *self.questions, self.number_format)

    @property
    def questions(self) -> tuple[str, ...]:
        """The key of a comparison item by item: both runs must have it."""
        return (self.version, self.harness, self.definition, self.items_sha256)


@dataclass(frozen=True)
class LmEvalRecord(JsonObject):
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
        content = read_sealed(run_dir / FILE)
        return parse(LmEvalRecord, {k: v for k, v in content.items() if k != "seal"}, "record")
    except (FileNotFoundError, DamagedFileError, InvalidJsonError, AttributeError):
        return None


def read_final(run_dir: Path, record: RunRecord) -> LmEvalRecord | None:
    """Return the record if it is of the last weights of a finished run."""
    found = read(run_dir)
    ended = record.progress.iterations if record.progress else None
    return found if found and found.run == record.run and found.iterations == ended else None


def write(run_dir: Path, record: LmEvalRecord) -> None:
    """Write the record with its seal."""
    write_sealed(run_dir / FILE, record.to_json())
