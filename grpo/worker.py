"""Train one run of a GRPO study in this process, or resume it, and keep its record.

TRL stores checkpoints in RUN/checkpoints. A checkpoint with the file `complete` was written to its end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOConfig

from gpt2.initial_weights import derive_seed
from grpo import records
from grpo.grpo_settings import GrpoSettings, noise_of, run_name
from grpo.grpo_trainer import (
    DivergedError,
    DivergenceMonitor,
    RolloutNoiseTrainer,
    RolloutRewards,
    noisy_norms,
)
from grpo.gsm8k import Problem, digest, read_problems, reward, standard_error
from grpo.records import EXIT_INTERRUPTED, AccuracyEvaluation, GrpoRecord, Response, write_responses
from runtime import files
from runtime.detected_hardware import cpu_threads
from runtime.dotconfig import read_symbols
from runtime.errors import UserError, one_line, run_command
from runtime.files import DamagedFileError
from runtime.metrics_log import append_metrics, truncate_metrics
from runtime.output import printable
from runtime.resolved_target import export_environment
from runtime.signals import Interrupted, Stop


@torch.no_grad()
def evaluate(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    run_dir: Path,
    step: int,
    tokens: int,
    batch: int,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> AccuracyEvaluation:
    """Answer all problems by greedy decoding, record the responses, return the accuracy. The model has no noise."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": one.prompt}], tokenize=False, add_generation_prompt=True
        )
        for one in problems
    ]
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    ends = model.generation_config.eos_token_id or []
    ends = [tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
    greedy = GenerationConfig(
        do_sample=False, max_new_tokens=tokens, repetition_penalty=1.0, temperature=1.0, top_p=1.0, top_k=50,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=ends,
        disable_compile=True,
    )  # fmt: skip
    responses = [""] * len(texts)
    training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            inputs = tokenizer([texts[number] for number in chosen], return_tensors="pt", padding=True,
                               padding_side="left", add_special_tokens=False).to(model.device)  # fmt: skip
            with autocast():
                made = model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    generation_config=greedy,
                )
            answers = tokenizer.batch_decode(
                made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
            for number, text in zip(chosen, answers, strict=True):
                responses[number] = text
    finally:
        model.train(training)
    rewards = [reward(text, one.answer) for text, one in zip(responses, problems, strict=True)]
    rows = [
        Response(number, one.answer, text, value)
        for number, (one, text, value) in enumerate(zip(problems, responses, rewards, strict=True))
    ]
    write_responses(run_dir, f"test-{step:05}", rows)
    accuracy = sum(rewards) / len(rewards)
    return AccuracyEvaluation(step, accuracy, standard_error(accuracy, len(rewards)), len(rewards))


CHECKPOINTS, MODEL, COMPLETE = "checkpoints", "model", "complete"
PACKAGES = ("torch", "transformers", "trl", "accelerate")
Say = Callable[[str], None]


def problem_order(problems: int, steps: int, per_step: int, seed: int) -> list[int]:
    """Return the problems of all steps in order: every epoch is a permutation of (seed, epoch), cut to full steps."""
    order: list[int] = []
    for epoch in range(-(-steps * per_step // (problems // per_step * per_step))):
        generator = torch.Generator().manual_seed(derive_seed(seed, f"grpo.epoch.{epoch}"))
        order += torch.randperm(problems, generator=generator)[: problems // per_step * per_step].tolist()
    return order[: steps * per_step]


def weights_digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 over names and bytes of the parameters."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(name.encode())
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def load_model(name: str) -> tuple[Any, Any]:
    """Return the model in float32 and its tokenizer. UserError where they cannot be loaded or lack a chat template."""
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    except Exception as error:  # files, network and versions raise errors of any kind
        raise UserError(
            f"{name} cannot be loaded ({type(error).__name__}: {one_line(error)[:160]}); fix: CONFIG_GRPO_MODEL= a "
            "folder with a model and its tokenizer, or connect to the hub"
        ) from None
    if not tokenizer.chat_template:
        raise UserError(f"{name} has no chat template; fix: CONFIG_GRPO_MODEL= an instruction-tuned model")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def plain_arguments(arguments: GRPOConfig) -> dict[str, Any]:
    """Return TRL's arguments that are numbers, words and flags, without paths and names of this machine."""
    plain = arguments.to_dict()
    return {
        name: value
        for name, value in sorted(plain.items())
        if isinstance(value, str | int | float | bool) and not name.endswith(("_dir", "run_name"))
    }


class _Saves(TrainerCallback):  # type: ignore[misc]
    """Marks complete checkpoints, and ends the training where a signal asked to stop."""

    def __init__(self, stop: Stop, saved: Callable[[int], None]) -> None:
        self.stop, self.saved = stop, saved

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.stop.at_once = False
        if self.stop.requested:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saved(state.global_step)
        files.write_text(Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE, "")


def training_device() -> str:
    """Return the type of this machine's accelerator, else "cpu": on a Mac too, since GRPO was not tried on mps."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator and accelerator.type != "mps" else "cpu"


class GrpoRun:
    """One run. say: prints a line for the user."""

    def __init__(self, settings: GrpoSettings, arm: str, seed: int, stop: Stop, say: Say) -> None:
        self.settings, self.arm, self.seed, self.stop, self.say = settings, arm, seed, stop, say
        self.run_dir = settings.run_dir(arm, seed)
        self.schedule = noise_of(arm)
        self.train = read_problems(settings.train_file, "train")
        test = read_problems(settings.test_file, "test")
        self.identity = settings.identity(digest(self.train, test))
        self.test: list[Problem] = test[: settings.evaluate_limit] if settings.evaluate_limit else test
        self.steps = settings.steps(len(self.train))
        self.divergence = DivergenceMonitor()
        self.warned = False
        self.device_type = training_device()
        self.device_module: Any = torch.get_device_module(self.device_type)

    def run(self) -> str:
        """Train to the end, a divergence, or a signal. Returns the status of the record."""
        torch.set_num_threads(cpu_threads(self.settings.cpu_threads))
        self.started = time.monotonic()
        model, self.tokenizer = load_model(self.settings.model)
        previous = self._previous()
        checkpoint = self._last_checkpoint() if previous else None
        self.record = self._opening(model, previous, checkpoint)
        self.bf16 = self.device_type != "cpu" and self.device_module.is_bf16_supported()
        self.trainer = self._trainer(model)
        self.record = self.record.replace(arguments=plain_arguments(self.trainer.args))
        self._write(records.RUNNING)
        with files.open_append(self.run_dir / records.METRICS) as self.metrics:
            try:
                if not self.record.evaluations:
                    self._evaluate(0)
                self.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
                ended = self.record.step == self.steps
                status, error = (records.FINISHED, None) if ended else (records.INTERRUPTED, None)
            except DivergedError as problem:
                status, error = records.DIVERGED, f"step {self.record.step + 1}: {problem}"
                self.say(f"  diverged: {error}")
            except Exception as problem:
                self._write(records.FAILED, f"{type(problem).__name__}: {one_line(problem)}")
                raise
        if status == records.FINISHED:
            self.trainer.save_model(str(self.run_dir / MODEL))
        if status in records.ENDED:
            paths = records.response_files(self.run_dir).values()
            count = sum(len(records.read_responses(path)) for path in paths)
            self.record = self.record.replace(responses=count)
        self._write(status, error)
        if status in records.ENDED:
            for state in (self.run_dir / CHECKPOINTS).glob("checkpoint-*/trainer_state.json"):
                shutil.rmtree(state.parent)
            files.remove_files(self.run_dir / CHECKPOINTS, ["README.md"])  # that the library writes
        return status

    def _previous(self) -> GrpoRecord | None:
        """Return the record of an earlier process of this run; None where there is none that can continue."""
        try:
            found = records.read(self.run_dir)
        except DamagedFileError:
            return None
        return found if found and found.identity == self.identity else None

    def _opening(self, model: Any, previous: GrpoRecord | None, checkpoint: Path | None) -> GrpoRecord:
        """Return the record to continue: of the checkpoint's step, or a new one. Removes later lines and responses."""
        step = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
        truncate_metrics(self.run_dir / records.METRICS, step if checkpoint else -1)
        for name, path in records.response_files(self.run_dir).items():
            if int(name.partition("-")[2].partition(".")[0]) > step or not checkpoint:
                path.unlink()
        if previous and checkpoint:
            kept = tuple(one for one in previous.evaluations if one.step <= step)
            for one in records.train_steps(self.run_dir):
                self.divergence.observe(one.loss, one.grad_norm, one.reward)
            self.started -= previous.seconds
            return previous.replace(step=step, evaluations=kept)
        device = platform.machine() if self.device_type == "cpu" else self.device_module.get_device_name()
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        return GrpoRecord(
            run=run_name(self.arm, self.seed),
            arm=self.arm,
            seed=self.seed,
            status="running",
            error=None,
            identity=self.identity,
            model=self.settings.model,
            initial_weights=weights_digest(model),
            steps=self.steps,
            step=0,
            noisy_norms=len(noisy_norms(model, self.schedule)) if self.schedule else 0,
            seconds=0.0,
            environment={"device": device, **versions},
        )

    def _last_checkpoint(self) -> Path | None:
        found = [path.parent for path in (self.run_dir / CHECKPOINTS).glob(f"checkpoint-*/{COMPLETE}")]
        return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)

    def _trainer(self, model: Any) -> RolloutNoiseTrainer:
        settings, tracking = self.settings, self.settings.tracking
        if tracking.wandb:
            os.environ |= {"WANDB_MODE": tracking.wandb_mode, "WANDB_PROJECT": tracking.wandb_project}
            os.environ.setdefault("WANDB_DIR", str(self.run_dir))
        if tracking.tensorboard:
            os.environ["TENSORBOARD_LOGGING_DIR"] = str(self.run_dir / "tensorboard")
        report_to = [name for name in ("wandb", "tensorboard") if getattr(tracking, name)]
        arguments = GRPOConfig(
            output_dir=str(self.run_dir / CHECKPOINTS),
            run_name=self.record.run,
            report_to=report_to or "none",
            disable_tqdm=True,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="steps",
            save_steps=settings.checkpoint_steps,
            save_total_limit=2,
            seed=self.seed,
            shuffle_dataset=False,
            max_steps=self.steps,
            per_device_train_batch_size=settings.micro_batch,
            gradient_accumulation_steps=settings.prompts * settings.group // settings.micro_batch,
            num_generations=settings.group,
            max_completion_length=settings.response_tokens,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="constant",
            bf16=self.bf16,
            use_cpu=self.device_type == "cpu",
        )
        order = problem_order(len(self.train), self.steps, settings.prompts, self.seed)
        rows = [
            {"prompt": [{"role": "user", "content": self.train[number].prompt}], "problem": number,
             "answer": self.train[number].answer}
            for number in order
        ]  # fmt: skip
        return RolloutNoiseTrainer(
            model,
            RolloutRewards(self.run_dir),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=self.tokenizer,
            callbacks=[_Saves(self.stop, lambda step: self._write(records.RUNNING))],
            schedule=self.schedule,
            noise_seed=self.seed,
            on_step=self._after_step,
        )

    def _after_step(self, line: dict[str, Any]) -> None:
        """Log a step. DivergedError where it shows that the run diverged. Evaluate where it is due."""
        step = line["iteration"]
        append_metrics(self.metrics, line)
        if not self.warned and line["logp_diff_over"]:
            self.warned = True
            cause = (
                f"noise {line['sigma']:.3g} in the rollout" if line["sigma"] else "no noise in this rollout"
            )
            self.say(f"  note: logp_diff is {line['logp_diff']:+.3g} at step {step}, over 0.01; {cause}")
        self.divergence.observe(line["loss"], line["grad_norm"], line["reward"])
        self.record = self.record.replace(step=step)
        self.say(
            f"  step {step}/{self.steps}: reward {line['reward']:.3f}, loss {line['loss']:+.4f}, "
            f"noise {line['sigma']:.3g}, logp_diff {line['logp_diff']:+.2g}"
        )
        if step % self.settings.evaluate_steps == 0 or step == self.steps:
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        found = evaluate(
            self.trainer.accelerator.unwrap_model(self.trainer.model),
            self.tokenizer,
            self.test,
            self.run_dir,
            step,
            self.settings.response_tokens,
            self.settings.evaluate_batch,
            functools.partial(torch.autocast, self.device_type, torch.bfloat16)
            if self.bf16
            else contextlib.nullcontext,
        )
        self.record = self.record.replace(evaluations=(*self.record.evaluations, found))
        line = {"event": "test", "iteration": step, "accuracy": found.accuracy, "stderr": found.stderr}
        append_metrics(self.metrics, line)
        self.say(
            f"  step {step}/{self.steps}: accuracy {100 * found.accuracy:.2f} % ± {100 * found.stderr:.2f} on "
            f"{found.problems} test problems"
        )

    def _write(self, status: Any, error: str | None = None) -> None:
        seconds = time.monotonic() - self.started
        self.record = self.record.replace(status=status, error=error, seconds=seconds)
        records.write(self.run_dir, self.record)


# `python -m grpo.worker RUN_DIR/config ARM SEED`: train or resume one run. `make grpo` starts it.
#
# Progress goes to standard output, everything else to RUN_DIR/log.txt.


def main() -> int:
    config, arm, seed = sys.argv[1:]
    settings = GrpoSettings.from_symbols(read_symbols(Path(config)))
    stop = Stop().install(os.getppid())
    export_environment()  # before torch is imported
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")

    def say(text: str) -> None:
        print(printable(text), file=out, flush=True)

    with files.open_append(settings.run_dir(arm, int(seed)) / "log.txt") as log:
        for descriptor in (1, 2):  # of libraries
            os.dup2(log.fileno(), descriptor)
        try:
            status = GrpoRun(settings, arm, int(seed), stop, say).run()
        except Interrupted:  # before its first step
            return EXIT_INTERRUPTED
        except Exception as error:
            known = isinstance(error, UserError)
            say(f"error: {error}" if known else f"error: {type(error).__name__}: {one_line(error)[:200]}")
            if not known:
                traceback.print_exc(file=log)
            return 1
    return EXIT_INTERRUPTED if status == "interrupted" else 0


if __name__ == "__main__":
    run_command(main)
