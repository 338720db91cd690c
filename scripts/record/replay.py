"""Replay a run up to one of its steps, and record that step. The run's folder is only read.

A run is a pure function of its configuration, data and seed, so the replay is exact on the same machine. Every
replayed step is compared with metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from gpt2.artifacts import checkpoint, run_record
from gpt2.artifacts.metrics_log import Step, read_steps
from gpt2.artifacts.provenance import environment_record
from gpt2.config.batch import BatchPlan
from gpt2.config.config import Config
from gpt2.config.dotconfig import read_symbols
from gpt2.hardware import attention_kernels
from gpt2.hardware.resolve import target_record
from gpt2.system.errors import UserError
from gpt2.system.signals import Stop
from gpt2.train.fingerprint import NUMBERS
from gpt2.train.resume import refuse_another_run
from gpt2.train.run_plan import RunPlan
from gpt2.train.step import NotFiniteError, StepResult
from gpt2.train.trainer import TrainingRun
from numerics.record.debugger import StopAtOptimizer
from numerics.record.recorder import Recorder
from ra.names import VariantError, custom_variants
from ra.settings import AlternationSettings
from ra.variants import variant

# entries of run.json that explain other numbers, in `target` and `environment`
EXPLAINING = (
    "device", "dtype", "attention_backend", "torch", "driver", "threads", "numpy", "cuda", "rocm", "cudnn", "triton",
    "float32_matmul", "variables",
)  # fmt: skip


@dataclass(frozen=True)
class ReplayedStep:
    """A recorded step. start: steps before the replay, from a checkpoint where above 0. differences: one line each."""

    start: int
    result: StepResult | None
    checked: int
    differences: tuple[str, ...]
    notes: tuple[str, ...]


class RunReplay:
    """A run, ready to be replayed up to `step`, which counts from 1 as in metrics.jsonl."""

    def __init__(
        self, run_dir: Path, record: run_record.RunRecord, step: int, from_start: bool = False
    ) -> None:
        """from_start: from the initial weights, not from the nearest checkpoint."""
        planned = check_step(record, run_dir, step)
        assert record.batch
        assert record.target
        self.run_dir, self.record, self.step, self.planned = run_dir, record, step, planned
        symbols = read_symbols(run_dir / "config")
        config = Config.from_symbols(symbols)
        if config.sha256 != record.config_sha256:
            raise UserError(
                f"{run_dir / 'config'} is not the configuration of {record.run}: run.json has another checksum; fix: "
                "restore the file"
            )
        device = "cpu" if record.target.name == "cpu" else "auto"
        target = dataclasses.replace(config.target, name=device, dtype=record.target.dtype)
        self.config = config = dataclasses.replace(config, target=target)
        self.resolved = attention_kernels.prepare_device(target, config.model)
        if self.resolved.device == "cpu" and record.environment and record.environment.threads:
            torch.set_num_threads(record.environment.threads)
        warmup = record.schedule.warmup_iterations if record.schedule else None
        plan = RunPlan(
            run_dir,
            record.run,
            record.variant,
            record.seed,
            planned,
            BatchPlan(**dataclasses.asdict(record.batch)),
            warmup_iterations=warmup,
        )
        try:
            chosen = variant(record.variant, config.model, AlternationSettings.from_symbols(symbols))
        except VariantError as error:
            raise missing_source(run_dir, record) or error from error
        own = chosen.configure(config)
        self.run = TrainingRun(plan, own, self.resolved, chosen.parts, Stop(), shared=config)
        self.run.stepper.simulated_ranks = record.batch.world_size
        self._refuse_other_data()
        self.logged: Mapping[int, Step] = {
            line.iteration: line for line in read_steps(run_dir / "metrics.jsonl").steps
        }
        self.skipped: list[str] = []
        self.start = 0 if from_start else self._load_nearest()
        self.differences: list[str] = []
        self.checked = 0

    @property
    def seconds(self) -> float | None:
        """Expected duration of the replayed steps, from the speed of the run."""
        speed = self.record.throughput.tokens_per_second if self.record.throughput else None
        return (self.step - self.start) * self.run.plan.batch.tokens / speed if speed else None

    def _refuse_other_data(self) -> None:
        now, before = self.run.log.record["fingerprint"], self.record.fingerprint
        differing = [
            name
            for name in ("data", "tokenizer", "model", "batch")
            if before is None or now[name] != getattr(before, name)
        ]
        if differing:
            raise UserError(
                f"{self.record.run} trained with another {', '.join(differing)} than this machine has, so its steps "
                "cannot be replayed; fix: copy the prepared data of the run here (CONFIG_DATA_DIR), and use its code"
            )

    def _load_nearest(self) -> int:
        """Load the nearest usable checkpoint before the step. Return its iteration, 0 for the initial weights."""
        record = self.record
        assert record.fingerprint
        identity = record.fingerprint.to_json() | {"iterations": self.planned} | self.run.warmup
        found = [
            (int(path.name.partition(".")[0]), path)
            for folder in run_record.CHECKPOINTS
            for path in checkpoint.complete(self.run_dir / folder)
        ]
        for iteration, path in sorted(found, reverse=True):
            if iteration >= self.step:
                continue
            try:
                loaded = checkpoint.load(path)
                self.run.check_fits(loaded)
                refuse_another_run(loaded, identity, record.run, self.run_dir)
            except UserError as error:
                self.skipped.append(f"not used: {str(error).partition('; fix')[0]}")
                continue
            self.run.stepper.load_state(loaded.state)
            return iteration
        return 0

    @contextlib.contextmanager
    def at_step(self) -> Iterator[torch.Tensor]:
        """Replay the steps before the chosen one. Yield its batch, in the context of a training step."""
        self.run.iteration = self.start
        with (
            attention_kernels.attention_context(self.resolved, self.config.model.dropout),
            self.run.feed() as feed,
        ):
            for iteration in range(self.start, self.step - 1):
                self.check(iteration + 1, self.run.stepper.step(feed.get(), iteration, self.planned))
            yield feed.get()

    def record_step(self, recorder: Recorder) -> ReplayedStep:
        """Replay the steps before the chosen one, and record it."""
        notes: list[str] = []
        result = None
        with self.at_step() as ids_ET:
            try:
                result = self._recorded(recorder, ids_ET, notes)
            except NotFiniteError as error:
                notes.append(str(error).partition("; fix")[0])
            except BaseException:
                recorder.abort()
                raise
        notes += self.differences
        for note in notes:
            recorder.note(note)
        recorder.step()
        return ReplayedStep(self.start, result, self.checked, tuple(self.differences), tuple(notes))

    def _recorded(self, recorder: Recorder, ids_ET: torch.Tensor, notes: list[str]) -> StepResult:
        stepper, before = self.run.stepper, None
        if stepper.compile:
            before = copy.deepcopy(stepper.state())
            compiled = stepper.step(ids_ET, self.step - 1, self.planned)
            self.check(self.step, compiled)
            stepper.load_state(before)
        recorder.iteration = self.step
        recorder.start(stepper.model)
        result = stepper.step(ids_ET, self.step - 1, self.planned, StopAtOptimizer(recorder))
        if before is None:
            self.check(self.step, result)
        else:
            notes.append(
                f"step {self.step} is recorded without torch.compile: loss {result.loss!r}, compiled {compiled.loss!r}"
            )
        return result

    def check(self, step: int, result: StepResult) -> None:
        """Compare a replayed step with the line of the run. The first difference is kept, and the recorded step's."""
        line = self.logged.get(step)
        if line is None:
            return
        self.checked += 1
        pairs = [("loss", result.loss, line.loss), ("gradient norm", result.gradient_norm, line.grad_norm)]
        differing = [
            f"{name} {here!r} here, {logged!r} in metrics.jsonl"
            for name, here, logged in pairs
            if logged is not None and here != logged
        ]
        if differing and (not self.differences or step == self.step):
            self.differences.append(f"step {step} differs from the run: {'; '.join(differing)}")

    def reasons(self) -> list[str]:
        """Name what differs between this process and the run, from run.json."""
        record = self.record
        before = (record.target.to_json() if record.target else {}) | (
            record.environment.to_json() if record.environment else {}
        )
        now = target_record(self.resolved) | environment_record().to_json()
        found = [
            f"{name} {before.get(name)} in the run, {now.get(name)} here"
            for name in EXPLAINING
            if before.get(name) != now.get(name)
        ]
        code = [
            name for name, digest in before.get("code", {}).items() if now["code"].get(name, digest) != digest
        ]
        if code:
            found.append(f"changed source: {', '.join(code)}")
        if record.fingerprint and record.fingerprint.numbers != NUMBERS:
            found.append(f"NUMBERS {record.fingerprint.numbers} in the run, {NUMBERS} here")
        world = self.run.plan.batch.world_size
        if world > 1 and self.resolved.device != "cpu":
            found.append(f"the order in which the {world} ranks sum gradients, which is known for gloo alone")
        if record.fingerprint and self.run.log.record["fingerprint"]["initial_weights"] != (
            record.fingerprint.initial_weights
        ):
            found.append("other initial weights")
        return found


def missing_source(run_dir: Path, record: run_record.RunRecord) -> UserError | None:
    """Return an error that names the study's copy of a file that ra/custom lacks; None where none is lacking."""
    for source in sorted((run_dir.resolve().parents[1] / "own").glob("*.py")):
        if source.stem.upper() in record.variant.upper() and source.stem.upper() not in custom_variants():
            return UserError(
                f"{record.run} needs ra/custom/{source.name}, which does not exist; fix: copy {source} there"
            )
    return None


def check_step(record: run_record.RunRecord, run_dir: Path, step: int) -> int:
    """Return the planned iterations of the run. UserError where it has no such step, or no such plan."""
    if not (record.schedule and record.batch and record.fingerprint and record.target):
        raise UserError(
            f"{run_dir / 'run.json'} lacks schedule, batch, fingerprint or target, so its steps cannot be "
            "replayed; fix: train it with `make`"
        )
    planned = record.schedule.iterations
    if not 1 <= step <= planned:
        raise UserError(f"STEP={step} is not a step of {record.run}; fix: STEP=1 .. {planned}")
    return planned
