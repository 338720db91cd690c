"""Train a language model by GRPO, from the plan of a run to its record, or continue it. `GrpoRun.run` is all of it.

TRL stores its checkpoints in RUN/checkpoint; SHA256SUMS in each is written last. RUN/model is the trained model.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig

from gpt2.clocks import Clocks, device_synchroniser
from gpt2.fingerprint import NUMBERS, digest
from gpt2.initial_weights import derive_seed, state_digest
from gpt2.resume import RESTART, RunError, refuse_altered_metrics, refuse_differing
from grpo.accuracy import answers, load_model, rewards_of, write_responses
from grpo.gsm8k import digest as problems_digest
from grpo.gsm8k import read_problems
from grpo.rollout import DivergedError, RolloutNoiseTrainer, noisy_norms, recorded_rewards, refuse_divergence
from ra.arms import parse_arm
from referee.verdict.rows import ACCURACY, TEST, Row
from runtime import records, run_record
from runtime.metrics_log import MetricsLog, MetricsSum, truncate_metrics
from runtime.provenance import opening_record
from runtime.ranks import describe_failure
from runtime.records import Count, Record
from runtime.resolved_target import ResolvedTarget
from runtime.run_plan import RunPlan
from runtime.run_record import CHECKPOINTS, Clock, Fingerprint, RunRecord
from runtime.signals import Stop

CHECKPOINT, *_ = CHECKPOINTS
SAVED = "saved.json"
PACKAGES = ("transformers", "trl", "accelerate")


class Saved(Record, frozen=True):
    """saved.json of a checkpoint."""

    identity: Mapping[str, Any]  # what must agree between two processes of the run
    iteration: Count
    clocks: Clock
    metrics: MetricsSum  # of metrics.jsonl, whose later lines are written again
    accuracies: tuple[tuple[Count, float], ...]  # step, share of right answers
    notes: tuple[str, ...]


def problem_order(problems: int, steps: int, per_step: int, seed: int) -> list[int]:
    """Return the problems of all steps in order: every epoch is a permutation of (seed, epoch), cut to full steps."""
    order: list[int] = []
    epoch = problems // per_step * per_step
    for number in range(-(-steps * per_step // epoch)):
        generator = torch.Generator().manual_seed(derive_seed(seed, f"grpo.epoch.{number}"))
        order += torch.randperm(problems, generator=generator)[:epoch].tolist()
    return order[: steps * per_step]


class _Saves(TrainerCallback):  # type: ignore[misc]
    """Saves a checkpoint after CONFIG_CHECKPOINT_SECONDS, and ends the training where a signal asked to stop."""

    def __init__(self, run: GrpoRun) -> None:
        self.run, self.saved_at = run, time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run = self.run
        run.stop.at_once = False
        due = time.monotonic() - self.saved_at >= run.plan.settings.checkpoint_seconds
        control.should_save = (due or bool(run.stop.requested)) and state.global_step < run.plan.iterations
        control.should_training_stop = control.should_training_stop or bool(run.stop.requested)
        if control.should_save:
            run.fence()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.saved(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self.saved_at = time.monotonic()


class GrpoRun:
    """One run. fence: called before a write; it ends this process if another one has taken the run over."""

    def __init__(
        self,
        run_dir: Path,
        plan: RunPlan,
        resolved: ResolvedTarget,
        stop: Stop,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        assert plan.settings.grpo
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.run_dir, self.plan, self.resolved, self.stop, self.fence = run_dir, plan, resolved, stop, fence
        self.settings, self.arm = plan.settings.grpo, parse_arm(plan.arm)
        self.bf16 = resolved.dtype == "bfloat16"
        self.clocks = Clocks(synchronise=device_synchroniser(resolved.device))
        self.train, test = (read_problems(file, split) for file, split in self.settings.files)
        self.test = test[: self.settings.evaluate_limit or None]
        self.model, self.tokenizer = load_model(self.settings.model)
        if self.arm.noise:
            noisy_norms(self.model, self.arm.noise)  # NoiseError for a model that cannot have it
        record = self.opening()
        assert record.fingerprint
        self.identity = record.fingerprint.to_json() | {"iterations": plan.iterations}
        self.row = Row(
            study=plan.study, arm=plan.arm, seed=plan.seed, size=Path(self.settings.model).name,
            platform=run_record.platform_of(resolved.dtype), metric=ACCURACY, tokens=0, value=math.nan,
            data=f"{TEST}@{record.fingerprint.validation[:12]}", items=len(self.test),
        )  # fmt: skip
        self.log = MetricsLog(run_dir, record, fence)
        self.accuracies: dict[int, float] = {}  # by step
        self.iteration = 0

    def opening(self) -> RunRecord:
        """Return the record of the run before its first step."""
        plan, settings = self.plan, self.settings
        fingerprint = Fingerprint(
            model=digest([settings.model, settings.response_tokens]),
            data=problems_digest(self.train),
            tokenizer=digest(settings.model),
            batch=digest([plan.batch.effective, plan.batch.block_size, settings.group]),
            schedule=digest([plan.settings.optimizer.learning_rate, plan.iterations]),
            initial_weights=state_digest(self.model),
            validation=problems_digest(self.test),
            numbers=NUMBERS,
        )
        record = opening_record(plan, self.resolved, fingerprint, self.model.num_parameters())
        assert record.environment
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        return record.replace(environment=record.environment.replace(code=versions))

    def run(self) -> str:
        """Train to the end, a divergence, or a signal. Returns the status of the record."""
        checkpoint = self.resume()
        self.trainer = self.make_trainer()
        self.write("running")
        with self.log:
            try:
                if not self.accuracies:
                    self.evaluate()
                self.clocks.switch("train")
                self.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
                self.clocks.switch("checkpoint")
            except Exception as error:
                if isinstance(error, DivergedError):
                    error = DivergedError(f"after {self.iteration} steps: {error}")
                failure = describe_failure(error, self.run_dir, self.plan.batch.micro)
                self.write(failure.status, failure.error)
                raise error
        if self.iteration < self.plan.iterations:
            self.write("interrupted")
            return "interrupted"
        self.trainer.save_model(str(self.run_dir / run_record.WEIGHTS))
        self.write("finished")
        shutil.rmtree(self.run_dir / CHECKPOINT)
        return "finished"

    def resume(self) -> Path | None:
        """Restore the newest checkpoint, and remove the lines and responses of later steps.

        A damaged one is left out with a note; RunError where all are.
        """
        complete = (self.run_dir / CHECKPOINT).glob(f"checkpoint-*/{records.SUMS}")
        found = {int(path.parent.name.rpartition("-")[2]): path.parent for path in complete}
        damaged = []
        for step in sorted(found, reverse=True):
            if damage := records.check_sums(found[step], self.plan.owner, [SAVED]):
                damaged.append(f"{found[step]} is damaged: {damage[0]}")
                continue
            self.restore(records.read(Saved, found[step] / SAVED, self.plan.owner))
            break
        if damaged and not self.accuracies:
            raise RunError(f"{damaged[0]}, and no other is complete; fix: {RESTART.format(self.run_dir)}")
        self.log.notes += damaged
        metrics, step = self.run_dir / "metrics.jsonl", self.iteration if self.accuracies else -1
        truncate_metrics(metrics, step, [at * self.plan.batch.tokens for at in self.accuracies])
        for path in (self.run_dir / run_record.RESPONSES).glob("*.jsonl.gz"):
            if int(path.name.partition("-")[2].partition(".")[0]) > step:
                path.unlink()
        return found.get(step)

    def restore(self, saved: Saved) -> None:
        """Set the run to the state of a checkpoint. RunError for the checkpoint of another run."""
        refuse_differing(saved.identity, self.identity, self.plan.run, self.run_dir)
        refuse_altered_metrics(saved.metrics, self.run_dir / "metrics.jsonl")
        self.iteration, self.accuracies = saved.iteration, dict(saved.accuracies)
        self.clocks.add(saved.clocks.to_json())
        self.log.notes = [*saved.notes]

    def saved(self, folder: Path) -> None:
        """Mark a checkpoint that TRL has written to its end."""
        saved = Saved(
            self.identity, self.iteration, Clock(**self.clocks.seconds()), self.log.saved_sum(),
            tuple(self.accuracies.items()), tuple(self.log.notes),
        )  # fmt: skip
        records.write(folder / SAVED, saved, self.plan.owner)
        names = [path.name for path in folder.iterdir() if path.is_file()]
        records.write_sums(folder, self.plan.owner, sorted(names))  # last
        self.write("running")

    def make_trainer(self) -> RolloutNoiseTrainer:
        """Return TRL's trainer on the problems of all steps. Settings that are not named here are TRL's defaults."""
        settings, batch, optimizer = self.settings, self.plan.batch, self.plan.settings.optimizer
        arguments = GRPOConfig(
            output_dir=str(self.run_dir / CHECKPOINT),
            report_to="none",
            disable_tqdm=True,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",  # _Saves asks for checkpoints
            save_total_limit=2,
            seed=self.plan.seed,
            shuffle_dataset=False,
            max_steps=self.plan.iterations,
            per_device_train_batch_size=batch.micro,
            gradient_accumulation_steps=batch.accumulation,
            num_generations=settings.group,
            max_completion_length=settings.response_tokens,
            learning_rate=dict(self.arm.recipe).get("learning_rate", optimizer.learning_rate),
            lr_scheduler_type="constant",
            bf16=self.bf16,
            use_cpu=self.resolved.device_type == "cpu",
        )
        per_step = batch.effective // settings.group
        order = problem_order(len(self.train), self.plan.iterations, per_step, self.plan.seed)
        rows = [
            {"prompt": [{"role": "user", "content": self.train[number].prompt}], "problem": number,
             "answer": self.train[number].answer}
            for number in order
        ]  # fmt: skip
        return RolloutNoiseTrainer(
            self.model,
            recorded_rewards(self.run_dir),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=self.tokenizer,
            callbacks=[_Saves(self)],
            schedule=self.arm.noise,
            noise_seed=self.plan.seed,
            on_step=self.after_step,
        )

    @property
    def position(self) -> dict[str, Any]:
        """The step, its tokens and the training seconds, of a line of metrics.jsonl. tokens: at most."""
        tokens = self.iteration * self.plan.batch.tokens
        seconds = round(self.clocks.read("train"), 4)
        return {"iteration": self.iteration, "tokens": tokens, "train_seconds": seconds}

    def after_step(self, line: dict[str, Any]) -> None:
        """Log a step. DivergedError where it shows that the run diverged. Evaluate where it is due."""
        self.iteration = self.trainer.state.global_step
        self.log.log({"event": "train"} | self.position | line)
        refuse_divergence(line)
        if self.iteration % self.settings.evaluate_steps == 0 or self.iteration == self.plan.iterations:
            self.evaluate()

    def evaluate(self) -> None:
        """Answer the test problems, record the responses and the accuracy. The model has no noise."""
        step, settings = self.iteration, self.settings
        with self.clocks.on("evaluate"):
            self.log.phase("answering the test problems")
            model = self.trainer.accelerator.unwrap_model(self.trainer.model)
            with torch.autocast(self.resolved.device_type, torch.bfloat16, self.bf16):
                responses = answers(
                    model, self.tokenizer, self.test, settings.response_tokens, settings.evaluate_batch
                )
            rewards = rewards_of(responses, self.test)
        published = [one.answer for one in self.test]
        write_responses(self.run_dir, f"test-{step:05}", range(len(published)), published, responses, rewards)
        self.accuracies[step] = sum(rewards) / len(rewards)
        line = {"event": "validation"} | self.position | {"accuracy": self.accuracies[step]}
        self.log.log(line)
        tokens = self.plan.batch.tokens
        rows = [self.row.replace(tokens=at * tokens, value=share) for at, share in self.accuracies.items()]
        records.write_rows(self.run_dir, rows)

    def write(self, status: str, error: str | None = None) -> None:
        """Write run.json."""
        self.fence()
        place = self.position
        progress = {"iterations": place["iteration"], "tokens": place["tokens"]}
        entries = {
            "progress": progress | {"train_seconds": self.clocks.read("train")},
            "clock": self.clocks.seconds(),
            "schedule": {"iterations": self.plan.iterations, "cut": False},
        }
        self.log.write(status, error, entries)
