"""The record of a run: run.json as msgspec structs.

run.json is written atomically. A number that is unknown or not finite is null.
msgspec.json.schema(RunRecord) is its JSON schema.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from msgspec import structs

from referee.verdict.rows import Row
from runtime import files, records
from runtime.errors import UserError
from runtime.files import DamagedFileError
from runtime.records import Amount, Count, InvalidJsonError, Positive, Record, Share, Task, Text, parse

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

SCHEMA = 1
EVALUATIONS, ABOUT = "evaluations", "about.json"
RESPONSES, WEIGHTS = "responses", "model"  # folders of a GRPO run; the second has the trained model
ANOMALY = "anomaly"
# folders of a run: the newest states, the state before the decay, and those before a trigger of the monitor
CHECKPOINTS = ("checkpoint", "stable", ANOMALY)


class RecordError(UserError, RuntimeError):
    """A record is missing, unreadable, or does not follow the schema."""


class Fingerprint(Record, frozen=True):
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
    numerics_fix: str | None = None


class RecordedTarget(Record, frozen=True):
    """The device that ran the training, and the precision."""

    name: str
    device: str
    memory_bytes: Count
    dtype: str
    attention_backend: str
    torch: str | None
    driver: str | None


class Environment(Record, frozen=True):
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


class Batch(Record, frozen=True):
    """Sequences per optimizer step and their split."""

    effective: Positive
    micro: Positive
    accumulation: Positive
    world_size: Positive
    block_size: Positive


class Progress(Record, frozen=True):
    """Training so far."""

    iterations: Count
    tokens: Count
    train_seconds: Amount


class Clock(Record, frozen=True):
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


class RecordedValidation(Record, frozen=True):
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


class HellaSwagEntry(Record, frozen=True):
    """Accuracies on HellaSwag or on items of its form, or `absent`: the reason for no score."""

    absent: str | None = None
    acc: Share | None = None
    acc_stderr: Amount | None = None
    acc_norm: Share | None = None
    acc_norm_stderr: Amount | None = None
    items: Count | None = None
    items_sha256: Text | None = None


class PhasePeaks(Record, frozen=True):
    """Peak bytes of each phase of a step."""

    forward: Count | None
    backward: Count | None
    optimizer: Count | None


class Memory(Record, frozen=True):
    """Peak memory of the run."""

    peak_allocated_bytes: Count | None
    peak_reserved_bytes: Count | None
    predicted_bytes: Count | None
    by_phase: PhasePeaks | None


class Throughput(Record, frozen=True):
    """Training speed. mfu: model FLOPs utilisation."""

    tokens_per_second: float | None
    mfu: float | None


class LearnedPoint(NamedTuple):
    """Alternation probabilities of all layers after some training tokens."""

    tokens: Count
    probability: tuple[Share, ...]


class Learned(Record, frozen=True):
    """Scalars that the attentions learned, one per layer."""

    alternation_probability: tuple[Share, ...]
    history: tuple[LearnedPoint, ...]


class ScalarPoint(NamedTuple):
    """Another learned scalar after some training tokens: a value for each layer that has it."""

    tokens: Count
    name: Text
    values: tuple[float | None, ...]


class Schedule(Record, frozen=True):
    """Planned iterations. cut: whether the run ended before them. warmup_iterations: of "wsd" only."""

    iterations: Count
    cut: bool
    warmup_iterations: Count | None = None


class Fault(Record, frozen=True):
    """A step whose loss or gradient was not finite. repeated: None before the retry."""

    iteration: Count
    what: Literal["weight", "output", "loss", "gradient", "nothing"]
    name: str
    micro_batch: Count | None
    sequences: tuple[Count, ...]
    repeated: bool | None


class ModelFault(Record, frozen=True):
    """A violation of the trained model. size: relative to the largest output."""

    check: Text
    message: str
    size: float | None = None


class Admission(Record, frozen=True):
    """The examination of the trained model on validation windows. seconds: of this examination."""

    faults: tuple[ModelFault, ...]
    seconds: Amount


class Spike(NamedTuple):
    """A loss spike: the loss and the loss expected there, in nats."""

    iteration: Count
    loss: float
    expected: float


class RunRecord(Record, frozen=True):
    """The content of run.json. A part is None until it is known. study: the name of its folder, given by `write`.

    fixes: the computations that CONFIG_NUMERICS_FIX replaced, in words.
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
    admission: Admission | None = None
    scalars: tuple[ScalarPoint, ...] | None = None
    fixes: tuple[Text, ...] | None = None
    choice: HellaSwagEntry | None = None
    task: Task = "gpt2"
    study: str = ""

    @property
    def truncated(self) -> bool:
        """Whether the run ended before its planned iterations."""
        return self.schedule is not None and self.schedule.cut


def bits_per_byte(loss: float | None, tokens: int, text_bytes: int) -> float | None:
    """Return the nats of all tokens over ln 2 and over the bytes that they decode to; None where one is unknown.

    loss: mean nats per token. The result does not depend on the tokenizer's units (Gao et al. 2020, arXiv:2101.00027).
    """
    return loss * tokens / (math.log(2) * text_bytes) if loss is not None and text_bytes else None


def platform_of(dtype: str) -> str:
    """Return the platform of training in a number format, on its machine."""
    return {"bfloat16": "bf16"}.get(dtype, "fp32")


def run_name(variant: str, seed: int) -> str:
    """Return the run's folder name: RALEARN0. RA:5-7,9 and a name with = or a final digit get a dot: RA-5-7_9.0."""
    dot = "." if variant.startswith("RA:") or "=" in variant or variant[-1:].isdigit() else ""
    return f"{variant.replace(':', '-').replace(',', '_')}{dot}{seed}"


def blank(run: str, variant: str, seed: int) -> RunRecord:
    """Return the record of a run of which nothing else is known."""
    required = [field.name for field in structs.fields(RunRecord) if field.required]
    values: dict[str, Any] = dict.fromkeys(required)
    values |= {"schema": SCHEMA, "run": run, "variant": variant, "seed": seed, "status": "running"}
    return RunRecord(**values)


def write(run_dir: Path, record: RunRecord) -> None:
    """Write run.json; of a finished run SHA256SUMS before it, so that a finished run always has both."""
    record = record.replace(study=record.study or records.owner(run_dir).partition("/")[0])
    if record.status == "finished":
        records.write_sums(run_dir, owner(record), side_files(run_dir))
    records.write(run_dir / "run.json", record, owner(record))


def side_files(folder: Path) -> list[str]:
    """Return the files of a run or of an evaluation that SHA256SUMS lists."""
    names = ["config", "plan.json", "metrics.jsonl", ABOUT, records.ROWS]
    for inner in (records.ITEMS, RESPONSES, WEIGHTS):
        if os.path.isdir(f"{folder}/{inner}"):
            names += sorted(f"{inner}/{name}" for name in os.listdir(f"{folder}/{inner}") if name[0] != ".")
    return [name for name in names if os.path.exists(f"{folder}/{name}")]


def check(folder: Path, record: RunRecord, weights: bool = True) -> list[str]:
    """Return a message for every file of a finished run, or of an evaluation of it, that is not as SHA256SUMS says.

    weights: whether the files of a trained language model, which are large, are read.
    """
    return records.check_sums(folder, owner(record), side_files(folder), "" if weights else WEIGHTS)


def owner(record: RunRecord) -> str:
    """Return what the files of a run say that they belong to: the study and the run."""
    return f"{record.study}/{record.run}"


def read_rows(folder: Path, record: RunRecord) -> tuple[Row, ...]:
    """Return the rows of a run, or of one of its evaluations. DamagedFileError for a row of another run."""
    return records.read_rows(folder, (record.study, record.variant, record.seed))


class LaterEvaluation(NamedTuple):
    """An evaluation of a finished run, in a folder of its evaluations. about: facts that are no numbers."""

    folder: Path
    rows: tuple[Row, ...]
    about: Mapping[str, str | None]

    @property
    def platform(self) -> str:
        """The platform of its rows."""
        return self.rows[0].platform if self.rows else ""

    def row(self, metric: str) -> Row | None:
        """Return the row of a metric; None without one."""
        return next((row for row in self.rows if row.metric == metric), None)

    def items(self, row: Row) -> list[float]:
        """Return the values of the single items of a row."""
        values = records.read_items(self.folder, row)
        return [] if values is None else values.tolist()


def write_evaluation(
    folder: Path,
    record: RunRecord,
    scored: Iterable[tuple[Row, ArrayLike | None]],
    about: Mapping[str, str | None],
) -> None:
    """Replace an evaluation: its rows, the values of their items and the facts, with SHA256SUMS over them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = [row if items is None else records.write_items(folder, row, items) for row, items in scored]
    records.write_rows(folder, rows)
    files.write_json(folder / ABOUT, about)
    records.write_sums(folder, owner(record), side_files(folder))


def read_evaluation(folder: Path, record: RunRecord) -> LaterEvaluation | None:
    """Return an evaluation; None where there is none or it is damaged, which `make verify` names."""
    if check(folder, record):
        return None
    try:
        return LaterEvaluation(folder, read_rows(folder, record), files.read_json(folder / ABOUT))
    except (FileNotFoundError, DamagedFileError):
        return None


def altered(record: RunRecord, run_dir: Path, weights: bool = True) -> list[str]:
    """Return what `check` finds in a finished run; nothing in an unfinished one."""
    return check(run_dir, record, weights) if record.status == "finished" else []


def load(run_dir: Path) -> RunRecord:
    """Read the record in `run_dir`. RecordError where it is missing or unreadable, or breaks its schema."""
    path = run_dir / "run.json"
    try:
        value = records.read_plain(path)
    except FileNotFoundError as error:
        raise RecordError(f"{path} does not exist") from error
    except DamagedFileError as error:
        raise RecordError(f"{error}") from error
    if value.get("schema") != SCHEMA:
        raise RecordError(f"{path} is of schema {value.get('schema')!r}; this version reads schema {SCHEMA}")
    try:
        return from_json(value)
    except InvalidJsonError as error:
        raise RecordError(f"{path} does not follow the schema: {error}") from error


def load_given(run_dir: Path, tasks: tuple[Task, ...] = ("gpt2",)) -> RunRecord:
    """Read the record of a run that the user named. RecordError with a fix: none, a damaged one, another task."""
    fix = "fix: RUN=results/STUDY/runs/NAME of a run that exists"
    if not run_dir.is_dir():
        raise RecordError(f"{run_dir} is not a folder; {fix}")
    if not (run_dir / "run.json").exists():
        raise RecordError(f"{run_dir / 'run.json'} does not exist, so {run_dir} is not a run; {fix}")
    try:
        record = load(run_dir)
    except RecordError as error:
        raise RecordError(
            f"{error}; fix: restore the run's folder from a copy, or delete it and run `make`"
        ) from error
    if record.task not in tasks:
        raise RecordError(
            f"{run_dir} was trained by {record.task.upper()}, and this command reads runs of "
            f"{' and '.join(tasks).upper()}; fix: RUN= one of those"
        )
    return record


def from_json(value: Any) -> RunRecord:
    """Return plain JSON data as a record; InvalidJsonError names the first part that does not follow the schema."""
    return parse(RunRecord, value, "record")
