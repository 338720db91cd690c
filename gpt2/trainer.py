"""Train one run, from its plan to its record. `TrainingRun.train` is the loop, gpt2.resume its first step.

A run is a pure function of (configuration, data, plan, seed, variant), to the bit on a CPU and up to the order of sums
on a GPU. An interrupted run resumes from its last checkpoint. It writes run.json, metrics.jsonl, memory.json and
checkpoint/ into its folder.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt2 import dataset, tokenizer
from gpt2.clocks import Clocks, device_synchroniser, unevenness
from gpt2.evaluator import Evaluator, evaluate_sets, hellaswag_entry, hellaswag_rows, text_rows
from gpt2.fingerprint import initial_record
from gpt2.hellaswag import choice_items, load_items
from gpt2.measured_memory import PeakMeter, memory_entry
from gpt2.nan_debug import FaultLog
from gpt2.resume import check_fits, resume
from gpt2.training_step import NotFiniteError, Stepper, StepResult
from gpt2.transformer import GPT2, ModelParts
from gpt2.watch import RunFixes, SpikeDetector
from referee.verdict.rows import LOSS, VALIDATION, Row
from runtime import attention_kernels, checkpoint, ranks, records, resolved_target
from runtime.batch_plan import WARM_UP_STEPS
from runtime.metrics_log import MetricsLog
from runtime.ranks import describe_failure
from runtime.run_plan import RunPlan
from runtime.run_record import Admission, platform_of
from runtime.settings import Config
from runtime.signals import Interrupted, Stop

OBSERVED_STEP = WARM_UP_STEPS - 1  # step of each process in which the profiler observes the attention kernel
OBSERVED_DEVICES = ["card"]  # the CPU has one kernel, and the profiler's memory would count as the run's
EXAMINED_WINDOWS = 2
AHEAD = 3  # batches
SAVE_SHARE = 0.02  # largest share of the time spent on checkpoints


class TrainingRun:
    """The state of a run. `train` runs it; the other methods are its steps, in order of use."""

    def __init__(
        self,
        directory: Path,
        plan: RunPlan,
        config: Config,
        resolved: resolved_target.ResolvedTarget,
        parts: ModelParts,
        stop: Stop,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        """directory: of the run. config: the settings of the study with those of the arm.

        fence: called before anything is written; it ends this process if another one has taken the run over.
        """
        self.directory, self.plan, self.config = directory, plan, config
        self.resolved, self.stop, self.fence = resolved, stop, fence
        # (trained model, ids of validation windows) -> its examination, before the finished record
        self.examine: Callable[[GPT2, Tensor], Admission] | None = None
        self.device = resolved.device
        self.clocks = Clocks(synchronise=device_synchroniser(self.device))
        self.meter = PeakMeter(self.device)
        self.corpus = dataset.open_corpus(dataset.prepare(config.data, report=lambda text: None))
        windows = dataset.validation_windows(
            self.corpus.validation, config.model.block_size, config.evaluation.tokens
        )
        self.stepper = stepper = Stepper(
            config.model,
            config.optimizer,
            plan.batch,
            seed=plan.seed,
            device=self.device,
            dtype=resolved.dtype,
            compile=config.target.compile,
            parts=parts,
            warmup=plan.warmup_iterations,
            bfloat16_residual=config.target.bfloat16_residual,
        )
        record = initial_record(plan, resolved, stepper, self.corpus.fingerprint, windows)
        assert record.fingerprint
        self.row = Row(
            study=plan.study,
            arm=plan.arm,
            seed=plan.seed,
            size=config.model.size,
            platform=platform_of(resolved.dtype),
            data=f"{VALIDATION}@{record.fingerprint.validation[:12]}",
            metric=LOSS,
            tokens=0,
            value=math.nan,
        )
        self.scores: list[Row] = []  # of the trained model
        self.fixes = RunFixes(stepper, config.numerics_fix)
        self.log = MetricsLog(directory, record.replace(fixes=self.fixes.changes), fence)
        self.log.notes += filter(None, [resolved.note, *stepper.notes])
        self.evaluator = Evaluator(
            stepper.model,
            self.device,
            stepper.autocast,
            windows,
            tokenizer.load(config.data.tokenizer),
            config.evaluation,
            stop,
            self.note,
        )
        self.spikes, self.faults = SpikeDetector(), FaultLog()
        self.iteration = self.timed_steps = 0  # by all processes of the run; timed: on the training clock
        self.steps_made = 0  # by this process
        self.truncated = False
        self.saved_at, self.save_seconds = time.monotonic(), 0.0  # of the last checkpoint

    def train(self) -> str:
        """Train to the planned iteration, evaluate, and write a finished record. Return its status."""
        try:
            resume(self)
            self.write_record("running")
            with contextlib.closing(self.feed()) as feed, self.log:
                while not self.ended():
                    if self.evaluator.due(self.tokens):
                        self.evaluate()
                    self.one_step(feed)
                    if self.wsd and self.iteration == self.stepper.decay_start(self.plan.iterations):
                        self.save("stable", keep=1)
                    ranks.together(self.stop.check)
                    if any(ranks.agree(self.checkpoint_due())):
                        self.save()
                self.save()  # before anything that can fail
                self.evaluate()
                self.score_endings()
                self.evaluate_texts()
                self.examine_model()
            self.write_rows()
            self.summarize_notes()
            self.write_record("finished")
            if ranks.first():
                checkpoint.keep_newest(self.directory / "checkpoint")
        except Interrupted as reason:
            self.interrupted(reason)
        except Exception as error:
            self.failed(error)
            raise
        ranks.agree()  # no rank ends before the first has written its files
        return str(self.log.record["status"])

    def ended(self) -> bool:
        return self.truncated or self.iteration >= self.plan.iterations

    def one_step(self, feed: Iterator[Tensor]) -> None:
        """Wait for the batch, make the step and log it.

        The first steps of a process and steps that are compiled count as warm-up, on the clock "compile".
        """
        with self.clocks.on("data", synchronise=False):
            ids_ET = next(feed)
        warming = self.steps_made < WARM_UP_STEPS or self.stepper.compiles(self.iteration)
        self.clocks.switch("compile" if warming else "train", synchronise=False)
        measured = self.meter if self.steps_made == WARM_UP_STEPS else None
        if measured:
            measured.restart()  # compiling and tuning kernels allocate memory that training does not
        began = self.clocks.read("train")
        try:
            with self.observe_kernels(), self.stepper.observer.step(self.iteration + 1):
                result = self.stepper.step(ids_ET, self.iteration, self.plan.iterations, measured)
        except NotFiniteError as error:
            numbers = self.window_numbers(self.iteration)
            raise self.faults.explain(error, self.stepper, ids_ET, self.iteration, numbers) from None
        self.iteration += 1
        self.faults.passed(self.iteration)
        self.steps_made += 1
        self.stop.at_once = False
        if self.steps_made == 1:
            self.fixes.require_used()
        self.timed_steps += not warming
        limit = self.config.budget.hard_limit_seconds
        self.truncated = limit > 0 and any(ranks.agree(limit < self.clocks.total() and not self.ended()))
        if self.truncated:
            self.note(
                f"the run was cut at iteration {self.iteration} of {self.plan.iterations}: its wall time passed "
                f"CONFIG_GPT2_HARD_LIMIT ({limit:g} s); it did not finish its decay and is not judged"
            )
        if measured and ranks.first():
            entry = memory_entry(self.meter, self.plan.predicted_bytes)
            records.write(self.directory / "memory.json", entry, self.plan.owner)
        self.log_step(result, self.clocks.read("train") - began)

    def observe_kernels(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a step; the attention kernels of the observed one are recorded."""
        if self.steps_made != OBSERVED_STEP or self.resolved.device_class not in OBSERVED_DEVICES:
            return contextlib.nullcontext()
        return attention_kernels.record_kernels(self.log.record["target"], self.note)

    def check_fits(self, loaded: checkpoint.LoadedCheckpoint) -> None:
        stepper = self.stepper
        check_fits(loaded, self.plan.iterations, stepper.model, stepper.optimizer)

    @property
    def wsd(self) -> bool:
        """Whether the learning rate has a stable part, at whose end a checkpoint is kept."""
        return self.config.optimizer.schedule == "wsd"

    @property
    def warmup(self) -> dict[str, int]:
        """The warm-up iterations where their number is a part of the plan."""
        return {"warmup_iterations": self.stepper.warmup_iterations(self.plan.iterations)} if self.wsd else {}

    def identity(self) -> dict[str, Any]:
        """Return the values that must agree between two processes of one run."""
        return dict(self.log.record["fingerprint"]) | {"iterations": self.plan.iterations} | self.warmup

    def window_numbers(self, iteration: int) -> list[int]:
        """Return the numbers of the sequences in the effective batch of an iteration."""
        size, batch = len(self.corpus.train), self.plan.batch
        return dataset.window_numbers(size, batch.block_size, batch.effective, self.plan.seed, iteration)

    def feed(self) -> Generator[Tensor]:
        """Yield the batches that remain, of this rank's sequences."""
        windows, size = self.corpus.train.windows, self.plan.batch.block_size
        return prefetched(
            lambda k: windows(ranks.share(self.window_numbers(k)), size),
            range(self.iteration, self.plan.iterations),
            self.device,
        )

    def checkpoint_due(self) -> bool:
        """Whether enough time has passed; at most SAVE_SHARE of the time goes into saving, on a slow disk too."""
        return time.monotonic() - self.saved_at >= max(
            self.config.checkpoint_seconds, self.save_seconds / SAVE_SHARE
        )

    def save(self, folder: str = "checkpoint", keep: int = checkpoint.KEEP) -> None:
        """Save the complete state of the run. "stable": the checkpoint at the start of the decay."""
        began = time.monotonic()
        with self.clocks.on("checkpoint"):
            meta = {
                "of": self.identity(),
                "cut": self.truncated,
                "timed_steps": self.timed_steps,
                "notes": self.log.notes,
                "watch": self.spikes.losses,
                "spikes": self.spikes.spikes,
                "clocks": self.clocks.seconds(),
            } | self.evaluator.history()
            state = self.stepper.state()
            if ranks.first():
                meta["metrics"] = self.log.saved_sum().to_json()
                checkpoint.save(self.directory / folder, self.iteration, state, meta, keep, self.fence)
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - began
        self.write_record("running")

    @property
    def tokens(self) -> int:
        return self.iteration * self.plan.batch.tokens

    def evaluate(self) -> None:
        """Validate on the fixed windows, once for each number of tokens."""
        if self.evaluator.done(self.tokens):
            return
        seconds = self.clocks.read("train")
        with self.clocks.on("evaluate"):
            self.log.phase("validating")
            line = self.evaluator.validate(self.tokens, seconds)
        if self.ended() and ranks.first():
            self.fence()
            records.write_items(self.directory, self.row, self.evaluator.window_losses)
        self.log.log(line | {"iteration": self.iteration})
        self.write_record("running")
        self.write_rows()

    def write_rows(self) -> None:
        """Write every validation, with the training seconds before it, and the scores of the trained model."""
        row, count = self.row, len(self.evaluator.windows)
        rows = []
        for tokens, seconds, loss in self.evaluator.losses:
            rows.append(row.replace(tokens=int(tokens), value=loss, items=count))
            rows.append(row.replace(metric="train_seconds", tokens=int(tokens), value=seconds))
        if ranks.first():
            self.fence()
            records.write_rows(self.directory, [*rows, *self.scores])

    def score_endings(self) -> None:
        """Score HellaSwag on the trained model, else items of the held-out text; or record why there are none."""
        settings, evaluator = self.config.evaluation, self.evaluator
        with self.clocks.on("evaluate"):
            if settings.hellaswag:
                name, source = "hellaswag", self.plan.hellaswag
                limit = settings.hellaswag_limit
                items = load_items(source, limit) if source else self.plan.hellaswag_absent
            else:
                name, items = "choice", choice_items(evaluator.windows, evaluator.tokenizer)
            if isinstance(items, str):
                self.log.record[name] = {"absent": items}
                return
            self.log.phase(f"scoring {'HellaSwag' if settings.hellaswag else 'the choice of continuations'}")
            score = evaluator.score_items(items)
        self.log.record[name] = hellaswag_entry(score)
        row = self.row.replace(data=f"{name}@{score.items_sha256[:12]}", tokens=self.tokens)
        if ranks.first():
            self.scores += hellaswag_rows(self.directory, row, score)

    def evaluate_texts(self) -> None:
        """Evaluate the held-out texts of CONFIG_EVAL_SETS on the trained model. One that cannot be read is a note."""
        row = self.row.replace(tokens=self.tokens)
        with self.clocks.on("evaluate"):
            for text, nats in evaluate_sets(self.config, self.evaluator, self.log.phase, self.note):
                if ranks.first():
                    self.scores += text_rows(self.directory, row, text, nats)

    def examine_model(self) -> None:
        """Examine the trained model on the first validation windows, on the first rank."""
        if self.examine is None or not ranks.first():
            return
        self.stepper.clear_noise()
        ids_BT = torch.from_numpy(self.evaluator.windows[:EXAMINED_WINDOWS, :-1].astype("int64"))
        with self.clocks.on("evaluate"), self.stepper.autocast():
            found = self.examine(self.stepper.model, ids_BT.to(self.device))
        self.log.record["admission"] = found
        for fault in found.faults:
            self.note(f"the trained model fails the check {fault.check}: {fault.message}")

    def interrupted(self, reason: Interrupted) -> None:
        """Save everything after a request to stop. If saving fails, the previous checkpoint remains.

        Before a step of this process there is nothing to save.
        """
        if self.stop.at_once:
            if self.log.record["progress"]:  # the run is resumed, and its record written
                self.note(f"interrupted by {reason} after iteration {self.iteration}")
                self.write_record("interrupted")
            raise reason
        try:
            self.save()
        except checkpoint.CheckpointError as error:
            self.note(f"not saved when interrupted: {error}")
        self.note(f"interrupted by {reason} after iteration {self.iteration}")
        self.write_record("interrupted")

    def failed(self, error: Exception) -> None:
        """Record the error that ended the run."""
        failure = describe_failure(error, self.directory, self.plan.batch.micro)
        if failure.note:
            self.log.notes.append(f"stopped at iteration {self.iteration}: {failure.note}")
        with contextlib.suppress(OSError):  # the caller reports the error itself
            self.write_record(failure.status, failure.error)

    def summarize_notes(self) -> None:
        """Add end-of-run notes: transient faults, loss spikes, and unprinted, for the report, uneven step times."""
        uneven = unevenness([self.plan.batch.tokens / speed for speed in self.log.speeds()])
        warmup = self.stepper.warmup_iterations(self.plan.iterations)
        for text in filter(None, [*self.faults.messages(), self.spikes.summary(warmup)]):
            self.note(text)
        self.log.notes += filter(None, [uneven])

    def log_step(self, result: StepResult, seconds: float) -> None:
        """Log one step and, where its loss is a spike, the spike."""
        line = {
            "event": "train",
            "iteration": self.iteration,
            "tokens": self.tokens,
            "train_seconds": round(self.clocks.read("train"), 4),
            "loss": result.loss,
            "learning_rate": result.rate,
            "grad_norm": result.gradient_norm,
            "tokens_per_second": round(self.plan.batch.tokens / seconds, 1) if seconds > 0 else None,
            "memory_bytes": self.meter.peaks()["allocated"],
        }
        self.log.log(line)
        expected = self.spikes.observe(result.loss)
        if expected is not None:
            spike = {"iteration": self.iteration, "loss": result.loss, "expected": expected}
            self.spikes.spikes.append([*spike.values()])
            self.log.log({"event": "spike"} | spike)

    def note(self, message: str) -> None:
        self.log.note(self.iteration, message)

    def write_record(self, status: str, error: str | None = None) -> None:
        """Write run.json."""
        self.fence()
        clocks = self.clocks.seconds()
        speed = self.timed_steps * self.plan.batch.tokens / clocks["train"] if clocks["train"] > 0 else None
        peak = (self.resolved.target.peak_flops or 0) * ranks.world()
        entries = {
            "progress": {"iterations": self.iteration, "tokens": self.tokens, "train_seconds": clocks["train"]},
            "clock": clocks,
            "memory": memory_entry(self.meter, self.plan.predicted_bytes),
            "throughput": {
                "tokens_per_second": speed,
                "mfu": speed * self.stepper.model.flops_per_token() / peak if speed and peak else None,
            },
            "schedule": {"iterations": self.plan.iterations, "cut": self.truncated} | self.warmup,
            "faults": self.faults.faults,
            "spikes": self.spikes.spikes,
        }  # fmt: skip
        self.log.write(status, error, entries | self.evaluator.entries())


def prefetched(
    make: Callable[[int], np.ndarray], iterations: Sequence[int], device: str
) -> Generator[Tensor]:
    """Yield the batches of the iterations, int64 (E, T+1) on the device. A thread makes AHEAD of them in advance.

    make(iteration) -> uint16 (E, T+1).
    """

    def load(iteration: int) -> Tensor:
        ids_ET = torch.from_numpy(make(iteration).astype(np.int64))
        return ids_ET if device == "cpu" else ids_ET.pin_memory()

    with ThreadPoolExecutor(1, "prefetch") as pool:
        left = iter(iterations)
        ahead = deque(pool.submit(load, iteration) for iteration in itertools.islice(left, AHEAD))
        while ahead:
            yield ahead.popleft().result().to(device, non_blocking=True)
            ahead.extend(pool.submit(load, iteration) for iteration in itertools.islice(left, 1))
