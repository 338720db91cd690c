"""What a run writes down and tells: run.json, metrics.jsonl, and a JSON object a line on standard output."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from gpt2 import environment, record, target, tokenizer
from gpt2.model import weights_digest
from gpt2.revision import revision

if TYPE_CHECKING:
    from gpt2.config import Config
    from gpt2.step import Stepper
    from gpt2.train import RunPlan

ONLY_TOLD = ("started", "phase")  # these events are no numbers and not for metrics.jsonl
TOLD_SECONDS = 0.25  # between two lines of training for the terminal; metrics.jsonl gets every one


class Ledger:
    """The written side of a run in `directory`. Open it (as a context) to have metrics.jsonl written as well."""

    def __init__(self, directory: Path, opening: dict[str, Any], iterations: int) -> None:
        self.directory, self.record, self.iterations = directory, opening, iterations
        self.notes: list[str] = []
        self._metrics: TextIO | None = None
        self._told_at = 0.0

    def __enter__(self) -> Ledger:
        self._metrics = (self.directory / "metrics.jsonl").open("a")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._metrics:
            self._metrics.close()

    def tell(self, line: dict[str, Any], always: bool = False) -> None:
        """Every number goes to metrics.jsonl; whoever listens hears at most four lines a second."""
        if line["event"] not in ONLY_TOLD and self._metrics and not self._metrics.closed:
            record.append_metrics(self._metrics, line)
        now = time.monotonic()
        if always or now - self._told_at >= TOLD_SECONDS:
            self._told_at = now
            print_line(line | {"iterations": self.iterations})

    def note(self, iteration: int, message: str) -> None:
        """Something that the reader of the report must know."""
        self.notes.append(message)
        self.tell({"event": "note", "iteration": iteration, "message": message}, always=True)

    def write(self, status: str, error: str | None, entries: dict[str, Any]) -> None:
        """Bring run.json up to date."""
        self.record |= {"status": status, "error": error, "notes": self.notes} | entries
        record.write_json(self.directory / "run.json", self.record)

    def speeds(self) -> list[float]:
        """Tokens per second of every step on record, of all processes of the run."""
        lines = map(json.loads, (self.directory / "metrics.jsonl").read_text().splitlines())
        return [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]

    def last_record(self) -> dict[str, Any] | None:
        """What an earlier process of this run left; None where there is nothing readable."""
        try:
            return record.load(self.directory)
        except record.RecordError:
            return None


def opening_record(
    plan: RunPlan,
    config: Config,
    resolved: target.ResolvedTarget,
    stepper: Stepper,
    data_fingerprint: str,
    windows: np.ndarray,
) -> dict[str, Any]:
    """The record of a run before its first step: who it is, and what it must share with others to be compared."""
    code = revision()
    return record.blank(plan.run, plan.variant, plan.seed) | {
        "commit": code.commit,
        "dirty": code.dirty,
        "config_sha256": config.sha256,
        "fingerprint": {
            "model": digest(dataclasses.asdict(config.model)),
            "data": data_fingerprint,
            "tokenizer": tokenizer.fingerprint(),
            "batch": digest([plan.batch.effective, plan.batch.block_size]),
            "schedule": schedule_digest(config, plan.extended),
            "initial_weights": weights_digest(stepper.model, stepper.seed),
            "validation": hashlib.sha256(np.ascontiguousarray(windows).data).hexdigest(),
        },
        "target": target.record(resolved),
        "environment": environment.record(),
        "batch": dataclasses.asdict(plan.batch),
        "parameters": sum(p.numel() for p in stepper.model.parameters()),
    }


def schedule_digest(config: Config, extended: float) -> str:
    """What decides a learning rate. Of runs that were extended by one factor it is one, and of no others."""
    settings = dataclasses.asdict(config.optimizer)
    if settings["schedule"] == "cosine":  # as it was hashed when there was no other
        del settings["schedule"], settings["decay_fraction"]
    longer = [] if extended == 1 else [{"extended": extended}]
    return digest([settings, dataclasses.asdict(config.budget), *longer])


def digest(value: Any) -> str:
    """SHA-256 of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def keep_metrics(path: Path, iteration: int, evaluated: Sequence[int] = ()) -> None:
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
    record.write_text(path, "".join(text + "\n" for text in kept))


def print_line(line: dict[str, Any]) -> None:
    """One JSON line for whoever started this process; nobody may be listening any more."""
    try:
        print(json.dumps(line), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
