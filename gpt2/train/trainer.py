"""One training run, from its plan to its record; the loop in `Run.train` reads like a recipe.

A run is a pure function of (configuration, data, plan, seed, variant): where it was cut off it goes on from its
last checkpoint to the same numbers. It writes run.json, metrics.jsonl, memory.json and checkpoint/ into its
folder and tells its progress on standard output, a JSON object a line.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from gpt2.artifacts import checkpoint
from gpt2.artifacts.metrics_log import MetricsLog, truncate_metrics
from gpt2.config.config import Config
from gpt2.data import dataset
from gpt2.data.prefetch import BatchPrefetcher
from gpt2.eval.evaluator import Evaluator, hellaswag_entry
from gpt2.hardware import resolve
from gpt2.system import files
from gpt2.system.resource_errors import disk_full, out_of_memory
from gpt2.system.signals import Interrupted, Stop
from gpt2.train.clocks import Clocks, unevenness
from gpt2.train.fingerprint import initial_record
from gpt2.train.loss_spikes import SpikeDetector
from gpt2.train.nan_debug import FaultLog
from gpt2.train.peak_memory import PeakMeter
from gpt2.train.resume import clocks_before, refuse_another_run
from gpt2.train.run_plan import WARM_UP_STEPS, RunPlan
from gpt2.train.step import Attention, NotFiniteError, Stepper, StepResult

MEASURED_STEP = 2  # of each process: the step whose peak memory is measured by phase
SAVE_SHARE = 0.02  # of the time that checkpoints may take


def device_synchroniser(device: str) -> Any:
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


class Run:
    """The state of a run. `train()` is the whole of it; the rest are its steps, in the order of use."""

    def __init__(
        self,
        plan: RunPlan,
        config: Config,
        resolved: resolve.ResolvedTarget,
        attention: Attention,
        stop: Stop,
    ) -> None:
        self.plan, self.config, self.resolved, self.stop = plan, config, resolved, stop
        self.device = resolved.device
        self.clocks = Clocks(synchronise=device_synchroniser(self.device))
        self.meter = PeakMeter(self.device)
        self.corpus = dataset.open_corpus(dataset.prepare(config.data, report=lambda text: None))
        windows = dataset.validation_windows(
            self.corpus.validation, config.model.block_size, config.evaluation.tokens
        )
        self.stepper = Stepper(
            config.model,
            config.optimizer,
            plan.batch,
            seed=plan.seed,
            device=self.device,
            dtype=resolved.dtype,
            compile=config.target.compile,
            attention=attention,
            warmup=plan.warmup_iterations,
        )
        wsd = config.optimizer.schedule == "wsd"
        self.decay_start = self.stepper.decay_start(plan.iterations) if wsd else 0  # 0: nothing to keep there
        self.warmup = {"warmup_iterations": self.stepper.warmup_iterations(plan.iterations)} if wsd else {}
        self.iteration = 0
        self.truncated = False
        self.watch = SpikeDetector()
        self.spikes: list[list[float]] = []  # [iteration, loss, the loss that was to be expected]
        self.faults = FaultLog()
        self.save_seconds = 0.0  # that the last checkpoint took
        opening = initial_record(plan, config, resolved, self.stepper, self.corpus.fingerprint, windows)
        self.ledger = MetricsLog(plan.directory, opening, plan.iterations)
        self.scores = Evaluator(
            self.stepper.model,
            self.device,
            self.stepper.autocast,
            windows,
            config.evaluation,
            stop,
            self.note,
        )
        if resolved.note:
            self.ledger.notes.append(resolved.note)
        self.steps_made = 0  # by this process
        self.timed_steps = 0  # by all processes of the run, on the training clock
        self.saved_at = time.monotonic()

    # -- the recipe ---------------------------------------------------------------------------------------------

    def train(self) -> str:
        """Train to the planned iteration, evaluate, and leave a finished record. Returns the record's status."""
        try:
            self.resume()
            self.write_record("running")
            self.ledger.tell({"event": "started", "iteration": self.iteration}, always=True)
            with self.feed() as feed, self.ledger:
                while not self.ended():
                    if self.scores.due(self.tokens):
                        self.evaluate()
                    self.one_step(feed)
                    if self.iteration == self.decay_start:
                        self.save("stable", keep=1)
                    self.stop.check()
                    if self.checkpoint_due():
                        self.save()
                self.save()  # before anything that can fail
                self.evaluate()
                self.score_hellaswag()
            self.sum_up()
            self.write_record("finished")
            checkpoint.keep_newest(self.plan.directory / "checkpoint")
        except Interrupted as reason:
            self.interrupted(reason)
        except Exception as error:
            self.failed(error)
            raise
        return str(self.ledger.record["status"])

    def ended(self) -> bool:
        return self.truncated or self.iteration >= self.plan.iterations

    def one_step(self, feed: BatchPrefetcher) -> None:
        """Wait for the batch, make the step, put it on record.

        Warm-up are the first steps of a process, and later ones that are compiled: "compile" is their clock.
        """
        with self.clocks.on("data", synchronise=False):
            ids_ET = feed.get()
        warming = self.steps_made < WARM_UP_STEPS or self.stepper.compiles(self.iteration)
        self.clocks.switch("compile" if warming else "train", synchronise=False)
        measured = self.meter if self.steps_made == MEASURED_STEP else None
        began = self.clocks.read("train")
        try:
            result = self.stepper.step(ids_ET, self.iteration, self.plan.iterations, measured)
        except NotFiniteError as error:
            numbers = dataset.window_numbers(
                len(self.corpus.train),
                self.config.model.block_size,
                self.plan.batch.effective,
                self.plan.seed,
                self.iteration,
            )
            raise self.faults.explain(error, self.stepper, ids_ET, self.iteration, numbers) from None
        self.iteration += 1
        self.faults.passed(self.iteration)
        self.steps_made += 1
        self.timed_steps += not warming
        limit = self.config.budget.hard_limit_seconds * self.plan.extended
        self.truncated = 0 < limit < self.clocks.total() and self.iteration < self.plan.iterations
        if self.truncated:
            self.note(
                f"the run was cut at iteration {self.iteration} of {self.plan.iterations}: its wall time passed "
                f"CONFIG_GPT2_HARD_LIMIT ({limit:g} s); it did not finish its decay and is not judged"
            )
        if measured:
            files.write_json(self.plan.directory / "memory.json", self.memory())
        self.put_on_record(result, self.clocks.read("train") - began)

    # -- resuming and saving ------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one, with every clock where it stood."""
        plan = self.plan
        plan.directory.mkdir(parents=True, exist_ok=True)
        loaded = checkpoint.load_latest(plan.directory / "checkpoint")
        # an extended run begins where the decay of the shorter one began
        loaded = loaded or checkpoint.load_latest(plan.directory / "stable")
        if loaded:
            refuse_another_run(loaded, self.identity(), plan.run, plan.directory, plan.extended != 1)
            self.stepper.load_state(loaded.state)
            meta = loaded.meta
            self.iteration, self.truncated, self.timed_steps = (
                loaded.iteration,
                meta["cut"],
                meta["timed_steps"],
            )
            self.scores.losses, self.scores.learned = meta["losses"], meta["learned"]
            self.ledger.notes = meta["notes"] + loaded.skipped
            self.watch, self.spikes = SpikeDetector(meta["watch"]), meta["spikes"]
            before = clocks_before(loaded, self.ledger.last_record())
            spent = self.clocks.seconds()
            self.clocks = Clocks(
                {name: before[name] + spent[name] for name in spent},
                device_synchroniser(self.device),
            )
        before_this = self.ledger.last_record()
        self.faults = FaultLog(before_this.faults if before_this else ())
        evaluated = [int(row[0]) for row in self.scores.losses]
        truncate_metrics(plan.directory / "metrics.jsonl", self.iteration, evaluated)
        self.stop.check()

    def identity(self) -> dict[str, Any]:
        """What must not change between two processes of one run."""
        return dict(self.ledger.record["fingerprint"]) | {"iterations": self.plan.iterations} | self.warmup

    def feed(self) -> BatchPrefetcher:
        block, batch = self.config.model.block_size, self.plan.batch
        return BatchPrefetcher(
            lambda k: dataset.global_batch(self.corpus.train, block, batch.effective, self.plan.seed, k),
            self.iteration,
            self.plan.iterations,
            self.device,
        )

    def checkpoint_due(self) -> bool:
        """By time, and so seldom that saving takes less than SAVE_SHARE of the run however slow the disk is."""
        every = max(self.config.checkpoint_seconds, self.save_seconds / SAVE_SHARE)
        return time.monotonic() - self.saved_at >= every

    def save(self, folder: str = "checkpoint", keep: int = checkpoint.KEEP) -> None:
        """A checkpoint of everything that the rest of the run depends on. "stable": made where the decay begins."""
        began = time.monotonic()
        with self.clocks.on("checkpoint"):
            meta = {
                "of": self.identity(),
                "cut": self.truncated,
                "timed_steps": self.timed_steps,
                "losses": self.scores.losses,
                "learned": self.scores.learned,
                "notes": self.ledger.notes,
                "watch": self.watch.losses,
                "spikes": self.spikes,
                "clocks": self.clocks.seconds(),
            }
            checkpoint.save(self.plan.directory / folder, self.iteration, self.stepper.state(), meta, keep)
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - began
        self.write_record("running")

    # -- evaluating ---------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        return self.iteration * self.plan.batch.tokens

    def evaluate(self) -> None:
        """Validation on the fixed windows, once for each number of tokens."""
        if self.scores.done(self.tokens):
            return
        seconds = self.clocks.read("train")
        with self.clocks.on("evaluate"):
            self.ledger.tell({"event": "phase", "phase": "validating"}, always=True)
            line = self.scores.validate(self.tokens, seconds)
        if self.ended():
            windows = {"tokens": self.tokens, "losses": self.scores.window_losses}
            files.write_json(self.plan.directory / "validation_windows.json", windows)
        self.ledger.tell(line | {"iteration": self.iteration}, always=True)
        self.write_record("running")

    def score_hellaswag(self) -> None:
        """HellaSwag on the trained model, or the reason why there is no score; never a made-up number."""
        if not self.config.evaluation.hellaswag:
            return
        if isinstance(self.plan.hellaswag, str):
            self.ledger.record["hellaswag"] = {"absent": self.plan.hellaswag}
            return
        with self.clocks.on("evaluate"):
            self.ledger.tell({"event": "phase", "phase": "scoring HellaSwag"}, always=True)
            score = self.scores.score_hellaswag(self.plan.hellaswag)
        self.ledger.record["hellaswag"] = hellaswag_entry(score)
        by_item = ("choices", "choices_norm", "correct", "correct_norm")
        files.write_json(
            self.plan.directory / "hellaswag.json", {key: getattr(score, key) for key in by_item}
        )

    # -- ending early -------------------------------------------------------------------------------------------

    def interrupted(self, reason: Interrupted) -> None:
        """Asked to stop: everything is saved, and where it cannot be, the last checkpoint stands."""
        try:
            self.save()
        except checkpoint.CheckpointError as error:
            self.note(f"not saved when interrupted: {error}")
        self.note(f"interrupted by {reason} after iteration {self.iteration}")
        self.write_record("interrupted")

    def failed(self, error: Exception) -> None:
        """The record of a run that cannot go on here; a full disk is no fault of the run."""
        if disk_full(error):
            self.ledger.notes.append(f"the disk was full at iteration {self.iteration}")
            status, reason = "interrupted", None
        elif out_of_memory(error):
            status, reason = "failed", f"out of memory at micro-batch {self.plan.batch.micro}: {error}"
        else:
            status, reason = "failed", f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # the error itself is told by whoever called
            self.write_record(status, reason)

    def sum_up(self) -> None:
        """What the reader of the report must know of the way here: faults that passed, loss spikes, a busy machine."""
        for message in self.faults.messages():
            self.note(message)
        if self.spikes:
            iteration, loss, expected = max(self.spikes, key=lambda spike: spike[1] - spike[2])
            self.note(
                f"{len(self.spikes)} loss spikes; the largest at iteration {iteration}: {loss:.2f} where "
                f"{expected:.2f} was to be expected"
            )
        uneven = unevenness([self.plan.batch.tokens / speed for speed in self.ledger.speeds()])
        if uneven:
            self.note(uneven)

    # -- telling ------------------------------------------------------------------------------------------------

    def put_on_record(self, result: StepResult, seconds: float) -> None:
        self.ledger.tell(
            {
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
        )
        expected = self.watch.observe(result.loss)
        if expected is not None:
            self.spikes.append([self.iteration, result.loss, expected])
            self.ledger.tell(
                {"event": "spike", "iteration": self.iteration, "loss": result.loss, "expected": expected}
            )

    def note(self, message: str) -> None:
        self.ledger.note(self.iteration, message)

    def memory(self) -> dict[str, Any]:
        peaks = self.meter.peaks()
        phases = ("forward", "backward", "optimizer")
        return {
            "peak_allocated_bytes": peaks["allocated"],
            "peak_reserved_bytes": peaks["reserved"],
            "predicted_bytes": self.plan.predicted_bytes,
            "by_phase": {name: self.meter.by_phase.get(name) for name in phases},
        }

    def write_record(self, status: str, error: str | None = None) -> None:
        """Bring run.json up to date."""
        clocks = self.clocks.seconds()
        timed_tokens = self.timed_steps * self.plan.batch.tokens
        speed = timed_tokens / clocks["train"] if clocks["train"] > 0 else None
        peak = self.resolved.target.peak_flops
        entries = {
            "progress": {
                "iterations": self.iteration, "tokens": self.tokens, "train_seconds": clocks["train"],
            },
            "clock": clocks,
            "memory": self.memory(),
            "throughput": {
                "tokens_per_second": speed,
                "mfu": speed * self.stepper.model.flops_per_token() / peak if speed and peak else None,
            },
            "schedule": {"iterations": self.plan.iterations, "cut": self.truncated} | self.warmup,
            "faults": self.faults.faults,
            "spikes": self.spikes,
        }  # fmt: skip
        self.ledger.write(status, error, entries | self.scores.entries())
