"""The steps of a run as a ReplayedStep: for record, repeat, bisect and oracle. The run's folder is only read.

A run is a pure function of its configuration, data and seed, so the replay is exact on the same machine. Every step is
compared with metrics.jsonl the first time that it is replayed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpt2.fingerprint import NUMBERS
from gpt2.resume import refuse_another_run
from gpt2.trainer import TrainingRun
from gpt2.training_step import StepResult, StopBeforeUpdate
from gpt2.transformer import ModelParts
from gpt2.watch import LOSS, RunFixes, StepLoss
from referee.numerics.replayed_step import ReplayedStep
from runtime import attention_kernels, checkpoint, run_plan
from runtime.batch_plan import BatchPlan
from runtime.errors import UserError
from runtime.metrics_log import Step, read_steps
from runtime.provenance import environment_record
from runtime.resolved_target import target_record
from runtime.run_record import CHECKPOINTS, RunRecord
from runtime.settings import Config
from runtime.signals import Stop

# entries of run.json that explain other numbers, in `target` and `environment`
EXPLAINING = (
    "device", "dtype", "attention_backend", "torch", "driver", "threads", "numpy", "cuda", "rocm", "cudnn", "triton",
    "float32_matmul", "variables",
)  # fmt: skip
# (record, settings of the study) -> the configuration and the parts of the run's arm, which this package does not know
Build = Callable[[RunRecord, Config], tuple[Config, ModelParts]]


class RunReplay:
    """A run, ready to be replayed up to `step`, which counts from 1 as in metrics.jsonl.

    start: steps before the replay, from a checkpoint where above 0. skipped: checkpoints that cannot be used.
    differences: of replayed steps from metrics.jsonl. checked: how many were compared.
    """

    def __init__(
        self, run_dir: Path, record: RunRecord, step: int, build: Build, from_start: bool = False
    ) -> None:
        """from_start: from the initial weights, not from the nearest checkpoint."""
        planned = check_step(record, run_dir, step)
        assert record.batch
        assert record.target
        self.run_dir, self.record, self.step, self.planned = run_dir, record, step, planned
        plan = run_plan.load(run_dir / run_plan.FILE)
        device = "cpu" if record.target.name == "cpu" else "auto"
        target = dataclasses.replace(plan.settings.target, name=device, dtype=record.target.dtype)
        self.config = config = dataclasses.replace(plan.settings, target=target)
        self.resolved = attention_kernels.prepare_device(target, config.model)
        if self.resolved.device == "cpu" and record.environment and record.environment.threads:
            torch.set_num_threads(record.environment.threads)
        plan = plan.replace(settings=config, batch=BatchPlan(**record.batch.to_json()))
        own, parts = build(record, config)
        self.run = TrainingRun(run_dir, plan, own, self.resolved, parts, Stop())
        self.run.stepper.simulated_ranks = record.batch.world_size
        self._refuse_other_data()
        lines = read_steps(run_dir / "metrics.jsonl")
        self.logged: Mapping[int, Step] = {line.iteration: line for line in lines}
        self.skipped: list[str] = []
        self.start = 0 if from_start else self._load_nearest()
        self.run.iteration = self.start
        self.differences: list[str] = []
        self.checked, self._last_checked = 0, self.start

    def steps(self, before: Sequence[float] = (), **golden: Any) -> ReplayedStep:
        """Return the steps from the checkpoint to the chosen one. before, golden: as of ReplayedStep."""
        stepper, threads = self.run.stepper, torch.get_num_threads()

        def function() -> torch.Tensor:
            iteration = self.run.iteration
            windows = self.run.corpus.train.windows(
                self.run.window_numbers(iteration), self.run.plan.batch.block_size
            )
            ids_ET = torch.from_numpy(windows.astype(np.int64)).to(self.run.device)
            with attention_kernels.attention_context(self.resolved, self.config.model.dropout):
                result = stepper.step(ids_ET, iteration, self.planned)
            self.run.iteration += 1
            if iteration + 1 > self._last_checked and torch.get_num_threads() == threads:
                self._last_checked = iteration + 1
                self._check(iteration + 1, result)
            return torch.tensor([result.loss, result.gradient_norm], dtype=torch.float64)

        return ReplayedStep(
            function,
            {"": stepper.model, "optimizer": stepper.optimizer, "position": _Position(self.run)},
            steps=self.step - self.start,
            start=self.start,
            before=before,
            others={LOSS: StepLoss(stepper.loss)},
            fixes=lambda words: RunFixes(stepper, words),
            before_update=self._before_update,
            **golden,
        )

    @contextlib.contextmanager
    def _before_update(self, stop: Callable[[], None]) -> Iterator[None]:
        stepper = self.run.stepper
        before, stepper.observer = stepper.observer, StopBeforeUpdate(stop)
        try:
            yield
        finally:
            stepper.observer = before

    def _refuse_other_data(self) -> None:
        now, before = self.run.log.record["fingerprint"], self.record.fingerprint
        parts = ("data", "tokenizer", "model", "batch")
        if differing := [name for name in parts if now[name] != getattr(before, name)]:
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
            for folder in CHECKPOINTS
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

    def _check(self, step: int, result: StepResult) -> None:
        """Compare a replayed step with the line of the run. The first difference is kept, and the chosen step's."""
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
        assert record.target
        assert record.fingerprint
        before = record.target.to_json() | (record.environment.to_json() if record.environment else {})
        now = target_record(self.resolved) | environment_record().to_json()
        found = [
            f"{name} {before.get(name)} in the run, {now.get(name)} here"
            for name in EXPLAINING
            if before.get(name) != now.get(name)
        ]
        code = before.get("code", {}).items()
        if changed := [name for name, digest in code if now["code"].get(name, digest) != digest]:
            found.append(f"changed source: {', '.join(changed)}")
        if record.fingerprint.numbers != NUMBERS:
            found.append(f"NUMBERS {record.fingerprint.numbers} in the run, {NUMBERS} here")
        world = self.run.plan.batch.world_size
        if world > 1 and self.resolved.device != "cpu":
            found.append(f"the order in which the {world} ranks sum gradients, which is known for gloo alone")
        if self.run.log.record["fingerprint"]["initial_weights"] != record.fingerprint.initial_weights:
            found.append("other initial weights")
        return found


@dataclasses.dataclass
class _Position:
    """The next iteration of a run, as a part of the state."""

    run: TrainingRun

    def state_dict(self) -> dict[str, int]:
        return {"iteration": self.run.iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.run.iteration = state["iteration"]


def check_step(record: RunRecord, run_dir: Path, step: int) -> int:
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
