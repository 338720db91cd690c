"""Check the record of a finished run against its seal, its side files and itself. Needs no torch.

Each message names the file, the number and both values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gpt2.artifacts import metrics_log, seal
from gpt2.artifacts.run_record import (
    Batch,
    Environment,
    Fingerprint,
    HellaSwagEntry,
    Progress,
    RecordedTarget,
    RecordedValidation,
    RunRecord,
    Schedule,
    bits_per_byte,
)
from gpt2.system.read_files import DamagedFileError, parse_json, read_bytes, read_json
from study.stats.statistics import mean

REMEDY = "fix: restore the files from a copy, or delete the run's folder and run `make`"
MOST_MESSAGES = 3  # of a side file
# name, value, expected value, source of the expected value
Check = tuple[str, float | None, float | None, str]


@dataclass(frozen=True)
class FinishedValidation(RecordedValidation):
    """A validation with a finite loss."""

    loss: float


@dataclass(frozen=True)
class FinishedRecord(RunRecord):
    """A record whose results count: these parts are known. A type for readers; `load` returns RunRecord."""

    fingerprint: Fingerprint
    target: RecordedTarget
    batch: Batch
    progress: Progress
    validation: FinishedValidation
    environment: Environment
    schedule: Schedule


def disagreements(run: RunRecord, file: Callable[[str], Path], full: bool = False) -> list[str]:
    """Return a message for everything that does not agree; [] for a run without a final result.

    file: returns the path of a result file by its name. full: also parse every line of metrics.jsonl.
    """
    if run.status != "finished" or not (
        run.progress and run.batch and run.validation and run.validation.history
    ):
        return []
    record = cast("FinishedRecord", run)
    found = [f"{file('run.json').name}: {message}" for message in _differing(_own_numbers(record))]
    altered = set()
    for name, recorded in (record.seal.files if record.seal else {}).items():
        path = file(name)
        actual = seal.digest(path) if path.is_file() else "missing"
        if actual != recorded:
            altered.add(name)
            found.append(f"{path.name}: SHA-256 is {actual[:12]}; the record has {recorded[:12]}")
    for name, check in (
        ("metrics.jsonl", _metrics),
        ("validation_windows.json", _windows),
        ("hellaswag.json", _scores),
    ):
        path = file(name)
        if path.exists():
            try:
                messages = itertools.islice(
                    _differing(check(record, path, full and name not in altered)), MOST_MESSAGES
                )
                found += [f"{path.name}: {message}" for message in messages]
            except DamagedFileError as error:
                found.append(f"{error}")
            except (ArithmeticError, LookupError, TypeError, ValueError):
                found.append(f"{path.name}: entries are missing or of another type")
    return found


def _differing(checks: Iterator[Check]) -> Iterator[str]:
    for name, value, expected, source in checks:
        if value is None:  # not recorded
            continue
        if expected is None or not math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12):
            yield f"{name} is {value:.10g}; {source} gives {'none' if expected is None else f'{expected:.10g}'}"


def _exp(loss: float | None) -> float | None:
    return math.exp(loss) if loss is not None and loss < 700 else None


def _own_numbers(record: FinishedRecord) -> Iterator[Check]:
    """Numbers of run.json that follow from its other numbers."""
    progress, batch, validation = record.progress, record.batch, record.validation
    tokens, last = batch.effective * batch.block_size, validation.history[-1]
    losses = [row.loss for row in validation.history if row.loss is not None]
    yield "progress.tokens", progress.tokens, last.tokens, "the end of validation.history"
    yield "validation.loss", validation.loss, last.loss, "the end of validation.history"
    yield "validation.perplexity", validation.perplexity, _exp(validation.loss), "exp(validation.loss)"
    yield (
        "validation.best_perplexity",
        validation.best_perplexity,
        _exp(min(losses, default=None)),
        "validation.history",
    )
    bits = bits_per_byte(validation.loss, validation.tokens, validation.bytes)
    yield "validation.bits_per_byte", validation.bits_per_byte, bits, "validation.loss, tokens and bytes"
    for name, text in (record.eval_sets or {}).items():
        where, nats = f"eval_sets.{name}", (text.loss or 0.0) * text.tokens
        expected = {
            "perplexity": nats / text.tokens,
            "word_perplexity": nats / text.words,
            "byte_perplexity": nats / text.bytes,
        }
        for key, one in expected.items():
            yield f"{where}.{key}", getattr(text, key), _exp(one), f"{where}.loss"
        bits = bits_per_byte(text.loss, text.tokens, text.bytes)
        yield f"{where}.bits_per_byte", text.bits_per_byte, bits, f"{where}.loss, tokens and bytes"
    pairs = list(itertools.pairwise(validation.history))
    ordered = sum(a.tokens < b.tokens and a.train_seconds <= b.train_seconds for a, b in pairs)
    yield "validation.history: entries in order", ordered, len(pairs), "their number"
    if record.clock:
        yield "progress.train_seconds", progress.train_seconds, record.clock.train, "clock.train"
    if record.throughput and record.throughput.tokens_per_second and progress.train_seconds:
        speed = record.throughput.tokens_per_second
        steps = min(round(speed * progress.train_seconds / tokens), progress.iterations)
        whole = steps * tokens / progress.train_seconds
        yield "throughput.tokens_per_second", speed, whole, f"{steps} steps in progress.train_seconds"
    if record.memory and record.memory.peak_allocated_bytes is not None:
        allocated, phases = record.memory.peak_allocated_bytes, record.memory.by_phase
        highest = max([allocated, *filter(None, vars(phases).values() if phases else ())])
        yield "memory.peak_allocated_bytes", allocated, highest, "memory.by_phase"
        reserved = record.memory.peak_reserved_bytes
        if reserved is not None:
            yield (
                "memory.peak_reserved_bytes",
                reserved,
                max(allocated, reserved),
                "memory.peak_allocated_bytes",
            )
    if record.learned and record.learned.history:
        end = record.learned.history[-1]
        for number, pair in enumerate(
            zip(record.learned.alternation_probability, end.probability, strict=False)
        ):
            yield f"learned.alternation_probability[{number}]", *pair, "the end of learned.history"


def _metrics(record: FinishedRecord, path: Path, full: bool) -> Iterator[Check]:
    """Numbers of lines, and the validations. Without any step the file is that of a record from a table."""
    lines = read_bytes(path, metrics_log.SIZE_LIMIT).splitlines()
    steps = sum(b'"event": "train"' in line for line in lines)
    if steps or record.seal:
        yield "number of train lines", steps, record.progress.iterations, "progress.iterations"
    known = {row.tokens: row.loss for row in record.validation.history}
    for line in lines:
        if b'"event": "validation"' in line:
            row = parse_json(line, path)
            yield (
                f"loss at {row['tokens']} tokens",
                row["loss"],
                known.get(row["tokens"]),
                "validation.history",
            )
    if full:
        tokens = record.batch.effective * record.batch.block_size
        found = metrics_log.read_steps(path)
        yield "number of damaged lines", found.damaged, 0, "a complete file"
        for number, step in enumerate(found.steps, 1):
            yield f"iteration of train line {number}", step.iteration, number, "its place"
            yield f"tokens of train line {number}", step.tokens, number * tokens, "its place"


def _windows(record: FinishedRecord, path: Path, full: bool) -> Iterator[Check]:
    content: dict[str, Any] = read_json(path)
    losses = content["losses"]
    yield "tokens", content["tokens"], record.progress.tokens, "progress.tokens"
    yield "mean of losses", mean(losses), record.validation.loss, "validation.loss"
    scored = record.validation.tokens / record.batch.block_size
    yield "number of losses", len(losses), scored, "validation.tokens"


def _scores(record: FinishedRecord, path: Path, full: bool) -> Iterator[Check]:
    content: dict[str, Any] = read_json(path)
    score = record.hellaswag or HellaSwagEntry()
    for name, accuracy in (("correct", score.acc), ("correct_norm", score.acc_norm)):
        yield f"number of {name}", len(content[name]), score.items, "hellaswag.items"
        yield f"mean of {name}", mean(content[name]), accuracy, "the accuracy in the record"
