"""The record of a run: run.json, metrics.jsonl, and every response with its reward. SHA256SUMS of one that ended.

runs/qerl0/config            .config
runs/qerl0/run.json          GrpoRecord
runs/qerl0/metrics.jsonl     a line per step and per evaluation
runs/qerl0/responses/        train-00001.jsonl.gz: rollout of step 1; test-00020.jsonl.gz: evaluation after step 20
runs/qerl0/model/            final weights
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from runtime import records as checked
from runtime.files import DamagedFileError, write_bytes
from runtime.records import Amount, Count, Record, Share, Text

RECORD, METRICS, RESPONSES, CONFIG, PLAN = "run.json", "metrics.jsonl", "responses", "config", "plan.json"
FINISHED, DIVERGED, RUNNING, INTERRUPTED, FAILED = "finished", "diverged", "running", "interrupted", "failed"
EXIT_INTERRUPTED = 3  # of `python -m grpo.worker`
ENDED = (FINISHED, DIVERGED)  # runs that are not repeated


class AccuracyEvaluation(Record, frozen=True):
    """Accuracy on the test problems after a step, greedy decoding. stderr: over problems."""

    step: Count
    accuracy: Share
    stderr: Amount
    problems: Annotated[int, Meta(ge=1)]


class GrpoRecord(Record, frozen=True):
    """A run. error: why it diverged or failed. identity: digest of what the runs of a study share.

    step: the last one. initial_weights: digest of the model before training. noisy_norms: their number.
    responses: scored, at the end. arguments: of TRL.
    """

    run: Text
    arm: Text
    seed: Count
    status: Literal["running", "interrupted", "finished", "diverged", "failed"]
    error: str | None
    identity: Text
    model: Text
    initial_weights: str
    steps: Count
    step: Count
    noisy_norms: Count
    seconds: Amount
    environment: Mapping[str, str]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    evaluations: tuple[AccuracyEvaluation, ...] = ()
    responses: Count = 0

    @property
    def final(self) -> AccuracyEvaluation | None:
        """The evaluation after the last step of a finished run."""
        last = self.evaluations[-1] if self.evaluations else None
        return last if self.status == FINISHED and last and last.step == self.steps else None


def read(run_dir: Path) -> GrpoRecord | None:
    """Return the record; None where there is none. DamagedFileError if it is damaged."""
    try:
        return checked.read(GrpoRecord, run_dir / RECORD, checked.owner(run_dir))
    except FileNotFoundError:
        return None


def write(run_dir: Path, record: GrpoRecord) -> None:
    """Write run.json; of a run that ended SHA256SUMS over config, metrics.jsonl and the responses before it."""
    if record.status in ENDED:
        checked.write_sums(run_dir, checked.owner(run_dir), _summed(run_dir))
    checked.write(run_dir / RECORD, record, checked.owner(run_dir))


def _summed(run_dir: Path) -> list[str]:
    return [CONFIG, METRICS, *(f"{RESPONSES}/{name}" for name in response_files(run_dir))]


@dataclass(frozen=True)
class TrainStep:
    """One step of metrics.jsonl. logp_diff: rollout minus training, in nats; None where it was not measured."""

    loss: float | None
    grad_norm: float | None
    reward: float | None
    logp_diff: float | None
    logp_diff_absolute: float
    logp_diff_over: bool


def train_steps(run_dir: Path) -> list[TrainStep]:
    """Return the steps in metrics.jsonl; a torn line ends them."""
    names = [field.name for field in dataclasses.fields(TrainStep)]
    found = []
    try:
        for text in (run_dir / METRICS).read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if line["event"] == "train":
                found.append(TrainStep(**{name: line[name] for name in names}))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return found


class GrpoPlan(Record, frozen=True):
    """plan.json of a study. looks: planned numbers of seeds, each a look at the results. margin: in points."""

    looks: tuple[Annotated[int, Meta(ge=1)], ...]
    margin: float


def plan(folder: Path, seeds: int, margin: float) -> GrpoPlan:
    """Return the plan of a study and write what is new: its first call fixes the margin, more seeds are a look."""
    path = folder / PLAN
    try:
        found = checked.read(GrpoPlan, path)
    except FileNotFoundError:
        found = GrpoPlan((), margin)
    if not found.looks or seeds > found.looks[-1]:
        found = found.replace(looks=(*found.looks, seeds))
        folder.mkdir(parents=True, exist_ok=True)
        checked.write(path, found, folder.name)
    return found


@dataclass(frozen=True)
class Response:
    """One response of the model. answer: the published one. reward: 1.0 or 0.0."""

    problem: int
    answer: str
    response: str
    reward: float


def write_responses(run_dir: Path, name: str, rows: Sequence[Response]) -> None:
    """Write a file of responses. name: train-00001 or test-00020."""
    text = "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
    path = run_dir / RESPONSES / f"{name}.jsonl.gz"
    path.parent.mkdir(exist_ok=True)
    write_bytes(path, gzip.compress(text.encode(), mtime=0))


def read_responses(path: Path) -> list[Response]:
    """Read a file of responses. DamagedFileError where it cannot be read."""
    try:
        rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        return [Response(row["problem"], row["answer"], row["response"], row["reward"]) for row in rows]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from None


def response_files(run_dir: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted((run_dir / RESPONSES).glob("*.jsonl.gz"))}


def problems_of(run_dir: Path) -> list[str]:
    """Return a message for every file of a run that ended that is not as SHA256SUMS says."""
    return checked.check_sums(run_dir, checked.owner(run_dir), _summed(run_dir))
