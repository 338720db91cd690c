"""The record of a run: run.json with its seal, metrics.jsonl, and every response with its reward. Needs no torch.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo.gsm8k import reward
from runtime.files import DamagedFileError, write_bytes
from runtime.seal import Seal, digest, read_sealed, write_sealed
from runtime.typed_json import Amount, Count, InvalidJsonError, JsonObject, Range, Share, Text, parse

RECORD, METRICS, RESPONSES, CONFIG, PLAN = "run.json", "metrics.jsonl", "responses", "config", "plan.json"
FINISHED, DIVERGED, RUNNING, INTERRUPTED, FAILED = "finished", "diverged", "running", "interrupted", "failed"
EXIT_INTERRUPTED = 3  # of `python -m grpo.train`
ENDED = (FINISHED, DIVERGED)  # runs that are not repeated


@dataclass(frozen=True)
class AccuracyEvaluation(JsonObject):
    """Accuracy on the test problems after a step, greedy decoding. stderr: over problems."""

    step: Count
    accuracy: Share
    stderr: Amount
    problems: Annotated[int, Range(1)]


@dataclass(frozen=True)
class RewardCheck(JsonObject):
    """Rewards recomputed from the recorded responses. differing: not equal to the recorded ones."""

    responses: Count
    differing: Count


@dataclass(frozen=True)
class GrpoRecord(JsonObject):
    """A run. error: why it diverged or failed. identity: digest of what the runs of a study share.

    step: the last one. initial_weights: digest of the model before training. noisy_norms: their number.
    digests: SHA-256 of the files of responses. arguments: of TRL.
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
    reward_check: RewardCheck | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    seal: Seal | None = None

    @property
    def final(self) -> AccuracyEvaluation | None:
        """The evaluation after the last step of a finished run."""
        last = self.evaluations[-1] if self.evaluations else None
        return last if self.status == FINISHED and last and last.step == self.steps else None


def read(run_dir: Path) -> GrpoRecord | None:
    """Return the record; None where there is none. DamagedFileError if it does not agree with its seal."""
    path = run_dir / RECORD
    try:
        return parse(GrpoRecord, read_sealed(path), "record")
    except FileNotFoundError:
        return None
    except InvalidJsonError as error:
        raise DamagedFileError(f"{path} is not a GRPO record: {error}") from None


def write(run_dir: Path, record: GrpoRecord) -> None:
    """Write run.json. The seal of a run that ended covers config and metrics.jsonl."""
    content = {name: value for name, value in record.to_json().items() if name != "seal"}
    write_sealed(run_dir / RECORD, content, (CONFIG, METRICS) if record.status in ENDED else ())


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


@dataclass(frozen=True)
class GrpoPlan(JsonObject):
    """plan.json of a study. looks: planned numbers of seeds, each a look at the results. margin: in points."""

    looks: tuple[Annotated[int, Range(1)], ...]
    margin: float
    seal: Seal | None = None


def plan(folder: Path, seeds: int, margin: float) -> GrpoPlan:
    """Return the plan of a study and write what is new: its first call fixes the margin, more seeds are a look."""
    path = folder / PLAN
    try:
        found = parse(GrpoPlan, read_sealed(path), "plan")
    except FileNotFoundError:
        found = GrpoPlan((), margin)
    except InvalidJsonError as error:
        raise DamagedFileError(f"{path} is not a plan: {error}") from None
    if not found.looks or seeds > found.looks[-1]:
        found = dataclasses.replace(found, looks=(*found.looks, seeds), seal=None)
        folder.mkdir(parents=True, exist_ok=True)
        write_sealed(path, {"looks": list(found.looks), "margin": found.margin})
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


def check_rewards(run_dir: Path) -> RewardCheck:
    """Recompute the reward of every recorded response. DamagedFileError for a file that cannot be read."""
    count = differing = 0
    for path in response_files(run_dir).values():
        for row in read_responses(path):
            count += 1
            differing += reward(row.response, row.answer) != row.reward
    return RewardCheck(count, differing)


def problems_of(run_dir: Path, record: GrpoRecord) -> list[str]:
    """Return what does not agree with the record of a run that ended: side files, responses, rewards, accuracies."""
    found = []
    for name, expected in (record.seal.files if record.seal else {}).items():
        path = run_dir / name
        if not path.is_file() or digest(path) != expected:
            found.append(f"{name} does not agree with its seal")
    present = {name: digest(path) for name, path in response_files(run_dir).items()}
    found += [
        f"{RESPONSES}/{name} does not agree with the record"
        for name in sorted({*present, *record.digests})
        if present.get(name) != record.digests.get(name)
    ]
    if found:
        return found
    checked = check_rewards(run_dir)
    if checked.differing or checked != record.reward_check:
        found.append(f"{checked.differing} of {checked.responses} rewards differ when they are recomputed")
    for one in record.evaluations:
        rows = read_responses(run_dir / RESPONSES / f"test-{one.step:05}.jsonl.gz")
        if sum(row.reward for row in rows) / len(rows) != one.accuracy:
            found.append(f"the accuracy at step {one.step} differs from its responses")
    return found
