"""One training run, from its plan to its record; the loop in `Run.train` reads like a recipe.

A run is a pure function of (configuration, data, plan, seed, variant): where it was cut off it goes on from its
last checkpoint to the same numbers. It writes run.json, metrics.jsonl, memory.json and checkpoint/ into its
folder and tells its progress on standard output, a JSON object a line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from gpt2 import checkpoint, data, evaluate, hellaswag, record, target, tokenizer
from gpt2.batch import BatchPlan
from gpt2.clock import Clocks
from gpt2.config import Config
from gpt2.evaluate import EVALUATION_TOKENS
from gpt2.feed import Feed
from gpt2.interrupt import Interrupted, Stop
from gpt2.memory import PeakMeter
from gpt2.model import learned_scalars, weights_digest
from gpt2.revision import revision
from gpt2.step import Attention, NotFiniteError, Stepper, StepResult

WARM_UP_STEPS = 2  # of each process: kernels, allocator and caches settle; on the compile clock
MEASURED_STEP = 2  # of each process: the step whose peak memory is measured by phase
CUT_AT = 1.1  # times the time limit, on the training clock


@dataclass(frozen=True)
class RunPlan:
    """What the study decided for this run before it started."""

    directory: Path
    run: str
    variant: str
    seed: int
    iterations: int
    batch: BatchPlan
    predicted_bytes: int | None = None
    hellaswag: Path | str = "not asked for"  # the items, or the reason why there are none


def device_synchroniser(device: str) -> Any:
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


class Run:
    """The state of a run. `train()` is the whole of it; the rest are its steps, in the order of use."""

    def __init__(
        self, plan: RunPlan, config: Config, resolved: target.ResolvedTarget, attention: Attention, stop: Stop
    ) -> None:
        self.plan, self.config, self.resolved, self.stop = plan, config, resolved, stop
        self.device = resolved.device
        self.clocks = Clocks(synchronise=device_synchroniser(self.device))
        self.meter = PeakMeter(self.device)
        self.corpus = data.open_corpus(data.prepare(config.data, report=lambda text: None))
        self.windows = data.validation_windows(
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
        )
        self.iteration = 0
        self.cut = False
        self.losses: list[list[float]] = []  # validation history: [tokens, train seconds, loss]
        self.learned: list[list[Any]] = []  # [tokens, [p of each layer]]
        self.notes: list[str] = [resolved.note] if resolved.note else []
        self.record = self._new_record()
        self.metrics: TextIO | None = None
        self.steps_made = 0  # by this process
        self.timed_steps = 0  # by all processes of the run, on the training clock
        self.saved_at = time.monotonic()
        self.told_at = 0.0

    # -- the recipe ---------------------------------------------------------------------------------------------

    def train(self) -> str:
        """Train to the planned iteration, evaluate, and leave a finished record. Returns the record's status."""
        try:
            self.resume()
            self.write_record("running")
            self.metrics = (self.plan.directory / "metrics.jsonl").open("a")
            with self.feed() as feed, self.metrics:
                while not self.ended():
                    if self.evaluation_due():
                        self.evaluate()
                    self.one_step(feed)
                    self.stop.check()
                    if self.checkpoint_due():
                        self.save()
                self.save()  # before anything that can fail
                self.evaluate()
                self.score_hellaswag()
            self.write_record("finished")
        except Interrupted as reason:
            self.save()
            self.note(f"interrupted by {reason} after iteration {self.iteration}")
            self.write_record("interrupted")
        except torch.OutOfMemoryError as error:
            self.write_record("failed", f"out of memory at micro-batch {self.plan.batch.micro}: {error}")
            raise
        except Exception as error:
            self.write_record("failed", f"{type(error).__name__}: {error}")
            raise
        return str(self.record["status"])

    def ended(self) -> bool:
        return self.cut or self.iteration >= self.plan.iterations

    def one_step(self, feed: Feed) -> None:
        """Wait for the batch, make the step, put it on record; the first steps of a process are warm-up."""
        with self.clocks.on("data", synchronise=False):
            ids_ET = feed.get()
        warming = self.steps_made < WARM_UP_STEPS
        self.clocks.switch("compile" if warming else "train", synchronise=False)
        measured = self.meter if self.steps_made == MEASURED_STEP else None
        began = self.clocks.read("train")
        result = self.stepper.step(ids_ET, self.iteration, self.plan.iterations, measured)
        self.iteration += 1
        self.steps_made += 1
        self.timed_steps += not warming
        limit = self.config.budget.max_time_seconds
        self.cut = bool(limit) and self.clocks.read("train") > CUT_AT * limit
        if self.cut and self.iteration < self.plan.iterations:
            self.note(
                f"the training clock passed {CUT_AT} times its limit of {limit} s at iteration {self.iteration} of "
                f"{self.plan.iterations}: the schedule was cut"
            )
        if measured:
            record.write_json(self.plan.directory / "memory.json", self.memory())
        self.put_on_record(result, self.clocks.read("train") - began)

    # -- resuming and saving ------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one, with every clock where it stood."""
        self.plan.directory.mkdir(parents=True, exist_ok=True)
        loaded = checkpoint.load_latest(self.plan.directory / "checkpoint")
        if loaded:
            self.stepper.load_state(loaded.state)
            meta = loaded.meta
            self.iteration, self.cut, self.timed_steps = loaded.iteration, meta["cut"], meta["timed_steps"]
            self.losses, self.learned = meta["losses"], meta["learned"]
            self.notes = meta["notes"] + loaded.passed_over
            before, spent = self.clocks_before(loaded), self.clocks.seconds()
            self.clocks = Clocks(
                {name: before[name] + spent[name] for name in spent},
                device_synchroniser(self.device),
            )
        keep_metrics(self.plan.directory / "metrics.jsonl", self.iteration)
        self.stop.check()

    def clocks_before(self, loaded: checkpoint.Loaded) -> dict[str, float]:
        """The clocks at the checkpoint; the record written after it knows what writing it took."""
        clocks: dict[str, float] = loaded.meta["clocks"]
        try:
            written = record.load(self.plan.directory)
        except record.RecordError:
            return clocks
        if written["clock"] and written["progress"]["iterations"] == loaded.iteration:
            return {name: max(clocks[name], written["clock"][name]) for name in clocks}
        return clocks

    def feed(self) -> Feed:
        block, batch = self.config.model.block_size, self.plan.batch
        return Feed(
            lambda k: data.global_batch(self.corpus.train, block, batch.effective, self.plan.seed, k),
            self.iteration,
            self.plan.iterations,
            self.device,
        )

    def checkpoint_due(self) -> bool:
        return time.monotonic() - self.saved_at >= self.config.checkpoint_seconds

    def save(self) -> None:
        """A checkpoint of everything that the rest of the run depends on."""
        with self.clocks.on("checkpoint"):
            meta = {
                "cut": self.cut,
                "timed_steps": self.timed_steps,
                "losses": self.losses,
                "learned": self.learned,
                "notes": self.notes,
                "clocks": self.clocks.seconds(),
            }
            checkpoint.save(self.plan.directory / "checkpoint", self.iteration, self.stepper.state(), meta)
        self.saved_at = time.monotonic()
        self.write_record("running")

    # -- evaluating ---------------------------------------------------------------------------------------------

    def evaluation_due(self) -> bool:
        """Whether a point of the fixed token grid was passed since the last evaluation (never at 0 tokens)."""
        every = self.config.evaluation.interval_tokens
        last = self.losses[-1][0] if self.losses else 0
        return every > 0 and self.tokens // every > last // every

    @property
    def tokens(self) -> int:
        return self.iteration * self.plan.batch.tokens

    def evaluation_batch(self) -> int:
        tokens = EVALUATION_TOKENS[torch.device(self.device).type]
        return max(1, tokens // self.config.model.block_size)

    def evaluate(self) -> None:
        """Validation loss on the fixed windows, and what the attentions have learned, into the history."""
        if self.losses and self.losses[-1][0] == self.tokens:
            return
        with self.clocks.on("evaluate"):
            self.tell({"event": "phase", "phase": "validating"}, always=True)
            seen = evaluate.perplexity(
                self.stepper.model,
                self.windows,
                self.evaluation_batch(),
                self.device,
                self.stepper.autocast,
                stop=self.stop.check,
            )
        seconds = self.clocks.read("train")
        self.losses.append([self.tokens, seconds, seen.loss])
        scalars = learned_scalars(self.stepper.model).get("alternation_probability")
        if scalars:
            self.learned.append([self.tokens, scalars])
        self.tell(
            {
                "event": "validation",
                "iteration": self.iteration,
                "tokens": self.tokens,
                "train_seconds": seconds,
                "loss": seen.loss,
                "perplexity": seen.perplexity,
            },
            always=True,
        )
        self.write_record("running")

    def score_hellaswag(self) -> None:
        """HellaSwag on the trained model, or the reason why there is no score; never a made-up number."""
        settings = self.config.evaluation
        if not settings.hellaswag:
            return
        with self.clocks.on("evaluate"):
            self.tell({"event": "phase", "phase": "scoring HellaSwag"}, always=True)
            source = self.plan.hellaswag
            if isinstance(source, str):
                self.record["hellaswag"] = {"absent": source}
                return
            score = hellaswag.score(
                self.stepper.model,
                hellaswag.load_items(source, settings.hellaswag_limit),
                tokenizer.load(),
                batch_tokens=EVALUATION_TOKENS[torch.device(self.device).type],
                block_size=self.config.model.block_size,
                device=self.device,
                autocast=self.stepper.autocast,
                stop=self.stop.check,
            )
        keys = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "items")
        self.record["hellaswag"] = {key: getattr(score, key) for key in keys}
        choices = {"choices": score.choices, "choices_norm": score.choices_norm}
        record.write_json(self.plan.directory / "hellaswag.json", choices)

    # -- telling ------------------------------------------------------------------------------------------------

    def put_on_record(self, result: StepResult, seconds: float) -> None:
        line: dict[str, Any] = {
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
        self.tell(line)

    def note(self, message: str) -> None:
        self.notes.append(message)
        self.tell({"event": "note", "iteration": self.iteration, "message": message}, always=True)

    def tell(self, line: dict[str, Any], always: bool = False) -> None:
        """Every number goes to metrics.jsonl; the terminal hears at most four lines a second."""
        if line["event"] != "phase" and self.metrics and not self.metrics.closed:
            record.append_metrics(self.metrics, line)
        now = time.monotonic()
        if always or now - self.told_at >= 0.25:
            self.told_at = now
            print_line(line | {"iterations": self.plan.iterations})

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
        best = min((loss for _, _, loss in self.losses), default=None)
        last = self.losses[-1][2] if self.losses else None
        self.record |= {
            "status": status,
            "error": error,
            "progress": {
                "iterations": self.iteration, "tokens": self.tokens, "train_seconds": clocks["train"],
            },
            "clock": clocks,
            "validation": {
                "loss": last,
                "perplexity": perplexity_of(last),
                "best_perplexity": perplexity_of(best),
                "tokens": int(self.windows.shape[0]) * self.config.model.block_size,
                "history": self.losses,
            },
            "memory": self.memory(),
            "throughput": {
                "tokens_per_second": speed,
                "mfu": speed * self.stepper.model.flops_per_token() / peak if speed and peak else None,
            },
            "learned": {"alternation_probability": self.learned[-1][1], "history": self.learned}
            if self.learned
            else None,
            "schedule": {"iterations": self.plan.iterations, "cut": self.cut},
            "notes": self.notes,
        }  # fmt: skip
        record.write_json(self.plan.directory / "run.json", self.record)

    def _new_record(self) -> dict[str, Any]:
        config, plan = self.config, self.plan
        made = record.blank(plan.run, plan.variant, plan.seed)
        code = revision()
        return made | {
            "commit": code.commit,
            "dirty": code.dirty,
            "config_sha256": config.sha256,
            "fingerprint": {
                "model": digest(dataclasses.asdict(config.model)),
                "data": self.corpus.fingerprint,
                "tokenizer": tokenizer.fingerprint(),
                "batch": digest([plan.batch.effective, plan.batch.block_size]),
                "schedule": digest([dataclasses.asdict(config.optimizer), dataclasses.asdict(config.budget)]),
                "initial_weights": weights_digest(self.stepper.model, self.stepper.shared_names),
                "validation": hashlib.sha256(np.ascontiguousarray(self.windows).data).hexdigest(),
            },
            "target": target.record(self.resolved),
            "batch": dataclasses.asdict(plan.batch),
            "parameters": sum(p.numel() for p in self.stepper.model.parameters()),
        }


def perplexity_of(loss: float | None) -> float | None:
    """exp(loss), or None where there is no loss or the result is beyond a float."""
    return math.exp(loss) if loss is not None and loss < 700 else None


def digest(value: Any) -> str:
    """SHA-256 of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def keep_metrics(path: Path, iteration: int) -> None:
    """Drop the lines of metrics.jsonl that lie after `iteration` (they will be made again) or are torn."""
    if not path.exists():
        return
    kept = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line.get("iteration", 0) <= iteration:
            kept.append(text)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(text + "\n" for text in kept))
    temporary.replace(path)


def print_line(line: dict[str, Any]) -> None:
    """One JSON line for whoever started this process; nobody may be listening any more."""
    try:
        print(json.dumps(line), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


__all__ = ["NotFiniteError", "Run", "RunPlan"]
