"""The record of a run: run.json as frozen dataclasses. Standard library only.

run.json is written atomically and follows run.schema.json (schema 1), the published form of these classes. A number
that is unknown or not finite is null.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from runtime.errors import UserError
from runtime.eval_set_records import EvalSetEntry
from runtime.files import DamagedFileError
from runtime.seal import Seal, read_sealed, write_sealed
from runtime.typed_json import (
    Amount,
    Count,
    InvalidJsonError,
    JsonObject,
    Missing,
    Positive,
    Share,
    Text,
    parse,
)

SCHEMA = 1
SIDE_FILES = ("config", "metrics.jsonl", "validation_windows.json", "hellaswag.json", "choice.json")
ANOMALY = "anomaly"
# folders of a run: the newest states, the state before the decay, and those before a trigger of the monitor
CHECKPOINTS = ("checkpoint", "stable", ANOMALY)


class RecordError(UserError, RuntimeError):
    """A record is missing, unreadable, or does not follow the schema."""


@dataclass(frozen=True)
class Fingerprint(JsonObject):
    """Digests that comparable runs share; `initial_weights` per seed.

    numbers: NUMBERS of gpt2.fingerprint. numerics_fix: CONFIG_NUMERICS_FIX, if set.
    """

    model: str
    data: str
    tokenizer: str
    batch: str
    schedule: str
    initial_weights: str
    validation: str
    numbers: Positive
    numerics_fix: Missing[str] = None


@dataclass(frozen=True)
class RecordedTarget(JsonObject):
    """The device that ran the training, and the precision."""

    name: str
    device: str
    memory_bytes: Count
    dtype: str
    attention_backend: str
    torch: str | None
    driver: str | None


@dataclass(frozen=True)
class Environment(JsonObject):
    """Versions, environment variables and code that numbers may depend on.

    code: module -> digest, of the loaded modules of ra.custom.
    """

    python: str | None
    platform: str | None
    numpy: str | None
    cuda: str | None
    rocm: str | None
    cudnn: str | None
    float32_matmul: str | None
    threads: Count | None
    variables: Mapping[str, Any]
    code: Mapping[str, Any]
    triton: str | None
    deterministic: bool  # torch's deterministic algorithms


@dataclass(frozen=True)
class Batch(JsonObject):
    """Sequences per optimizer step and their split."""

    effective: Positive
    micro: Positive
    accumulation: Positive
    world_size: Positive
    block_size: Positive


@dataclass(frozen=True)
class Progress(JsonObject):
    """Training so far."""

    iterations: Count
    tokens: Count
    train_seconds: Amount


@dataclass(frozen=True)
class Clock(JsonObject):
    """Seconds by activity."""

    train: Amount
    compile: Amount
    evaluate: Amount
    checkpoint: Amount
    data: Amount

    @property
    def total(self) -> float:
        """Return the seconds of all activities."""
        return math.fsum((self.train, self.compile, self.evaluate, self.checkpoint, self.data))


class Evaluation(NamedTuple):
    """One validation: training tokens and seconds before it, and the loss in nats."""

    tokens: Count
    train_seconds: Amount
    loss: float | None


@dataclass(frozen=True)
class RecordedValidation(JsonObject):
    """The last validation and the history. tokens: scored at each validation.

    bytes: of UTF-8 that these tokens decode to; an end of text has none.
    """

    loss: float | None
    perplexity: float | None
    best_perplexity: float | None
    tokens: Count
    history: tuple[Evaluation, ...]
    bytes: Count
    bits_per_byte: float | None


@dataclass(frozen=True)
class HellaSwagEntry(JsonObject):
    """Accuracies on HellaSwag or on items of its form, or `absent`: the reason for no score."""

    absent: Missing[str] = None
    acc: Missing[Share] = None
    acc_stderr: Missing[Amount] = None
    acc_norm: Missing[Share] = None
    acc_norm_stderr: Missing[Amount] = None
    items: Missing[Count] = None
    items_sha256: Missing[Text] = None


@dataclass(frozen=True)
class PhasePeaks(JsonObject):
    """Peak bytes of each phase of a step."""

    forward: Count | None
    backward: Count | None
    optimizer: Count | None


@dataclass(frozen=True)
class Memory(JsonObject):
    """Peak memory of the run."""

    peak_allocated_bytes: Count | None
    peak_reserved_bytes: Count | None
    predicted_bytes: Count | None
    by_phase: PhasePeaks | None


@dataclass(frozen=True)
class Throughput(JsonObject):
    """Training speed. mfu: model FLOPs utilisation."""

    tokens_per_second: float | None
    mfu: float | None


class LearnedPoint(NamedTuple):
    """Alternation probabilities of all layers after some training tokens."""

    tokens: Count
    probability: tuple[Share, ...]


@dataclass(frozen=True)
class Learned(JsonObject):
    """Scalars that the attentions learned, one per layer."""

    alternation_probability: tuple[Share, ...]
    history: tuple[LearnedPoint, ...]


class ScalarPoint(NamedTuple):
    """Another learned scalar after some training tokens: a value for each layer that has it."""

    tokens: Count
    name: Text
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Schedule(JsonObject):
    """Planned iterations. cut: whether the run ended before them. warmup_iterations: of "wsd" only."""

    iterations: Count
    cut: bool
    warmup_iterations: Missing[Count] = None


@dataclass(frozen=True)
class Fault(JsonObject):
    """A step whose loss or gradient was not finite. repeated: None before the retry."""

    iteration: Count
    what: Literal["weight", "output", "loss", "gradient", "nothing"]
    name: str
    micro_batch: Count | None
    sequences: tuple[Count, ...]
    repeated: bool | None


@dataclass(frozen=True)
class ModelFault(JsonObject):
    """A violation of the trained model. size: relative to the largest output."""

    check: Text
    message: str
    size: Missing[float] = None


@dataclass(frozen=True)
class Admission(JsonObject):
    """The examination of the trained model on validation windows. seconds: of this examination."""

    faults: tuple[ModelFault, ...]
    seconds: Amount


class Spike(NamedTuple):
    """A loss spike: the loss and the loss expected there, in nats."""

    iteration: Count
    loss: float
    expected: float


@dataclass(frozen=True)
class RunRecord(JsonObject):
    """The content of run.json. A part is None until it is known. seal: None before it is written.

    fixes: the computations that CONFIG_NUMERICS_FIX replaced, in words. eval_sets: by name, those of the run's end.
    choice: as hellaswag, of items made from the held-out text; scored where CONFIG_HELLASWAG is off.
    """

    schema: Literal[1]
    run: Text
    variant: Text
    seed: Count
    status: Literal["running", "interrupted", "finished", "failed"]
    error: str | None
    commit: str | None
    dirty: bool | None
    config_sha256: str | None
    fingerprint: Fingerprint | None
    target: RecordedTarget | None
    batch: Batch | None
    parameters: Count | None
    progress: Progress | None
    clock: Clock | None
    validation: RecordedValidation | None
    hellaswag: HellaSwagEntry | None
    memory: Memory | None
    throughput: Throughput | None
    learned: Learned | None
    environment: Environment | None
    schedule: Schedule | None
    notes: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    spikes: tuple[Spike, ...] = ()
    admission: Missing[Admission] = None
    scalars: Missing[tuple[ScalarPoint, ...]] = None
    fixes: Missing[tuple[Text, ...]] = None
    choice: Missing[HellaSwagEntry] = None
    eval_sets: Missing[Mapping[str, EvalSetEntry]] = None
    seal: Missing[Seal] = None

    @property
    def truncated(self) -> bool:
        """Whether the run ended before its planned iterations."""
        return self.schedule is not None and self.schedule.cut


def bits_per_byte(loss: float | None, tokens: int, text_bytes: int) -> float | None:
    """Return the nats of all tokens over ln 2 and over the bytes that they decode to; None where one is unknown.

    loss: mean nats per token. The result does not depend on the tokenizer's units (Gao et al. 2020, arXiv:2101.00027).
    """
    return loss * tokens / (math.log(2) * text_bytes) if loss is not None and text_bytes else None


def run_name(variant: str, seed: int) -> str:
    """Return the run's folder name: RALEARN0. RA:5-7,9 and a name with = or a final digit get a dot: RA-5-7_9.0."""
    dot = "." if variant.startswith("RA:") or "=" in variant or variant[-1:].isdigit() else ""
    return f"{variant.replace(':', '-').replace(',', '_')}{dot}{seed}"


def blank(run: str, variant: str, seed: int) -> RunRecord:
    """Return the record of a run of which nothing else is known."""
    required = [one.name for one in dataclasses.fields(RunRecord) if one.default is dataclasses.MISSING]
    values: dict[str, Any] = dict.fromkeys(required)
    values |= {"schema": SCHEMA, "run": run, "variant": variant, "seed": seed, "status": "running"}
    return RunRecord(**values)


def write(run_dir: Path, record: RunRecord) -> None:
    """Write run.json with a seal over itself and, of a finished run, over its side files."""
    plain = dataclasses.replace(record, seal=None).to_json()
    write_sealed(run_dir / "run.json", plain, SIDE_FILES if record.status == "finished" else ())


def load(run_dir: Path) -> RunRecord:
    """Read the record in `run_dir`. RecordError where it is missing or unreadable, or breaks its schema or its seal."""
    path = run_dir / "run.json"
    try:
        value = read_sealed(path)
    except FileNotFoundError as error:
        raise RecordError(f"{path} does not exist") from error
    except DamagedFileError as error:
        raise RecordError(f"{error}") from error
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        found = value.get("schema") if isinstance(value, dict) else type(value).__name__
        raise RecordError(f"{path} is of schema {found!r}; this version reads schema {SCHEMA}")
    try:
        return from_json(value)
    except InvalidJsonError as error:
        raise RecordError(f"{path} does not follow the schema: {error}") from error


def load_given(run_dir: Path) -> RunRecord:
    """Read the record of a run that the user named. RecordError with a fix where there is none or it is damaged."""
    fix = "fix: RUN=results/STUDY/runs/NAME of a run that exists"
    if not run_dir.is_dir():
        raise RecordError(f"{run_dir} is not a folder; {fix}")
    if not (run_dir / "run.json").exists():
        raise RecordError(f"{run_dir / 'run.json'} does not exist, so {run_dir} is not a run; {fix}")
    try:
        return load(run_dir)
    except RecordError as error:
        raise RecordError(
            f"{error}; fix: restore the run's folder from a copy, or delete it and run `make`"
        ) from error


def from_json(value: Any) -> RunRecord:
    """Return plain JSON data as a record; InvalidJsonError names the first part that does not follow the schema."""
    return parse(RunRecord, value, "record")
