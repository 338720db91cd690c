"""Play training steps of a run again, with fixed modules, another optimizer, or other settings."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpt2.artifacts.run_record import RunRecord
from gpt2.config.batch import plan_batch
from gpt2.config.config import Config
from gpt2.config.dotconfig import Entry, Symbols
from gpt2.hardware import attention_kernels
from gpt2.hardware.resolve import ResolvedTarget
from gpt2.numerics.fixes import RunFixes
from gpt2.system.errors import UserError, one_line
from gpt2.system.signals import Stop
from gpt2.train.run_plan import RunPlan
from gpt2.train.step import NotFiniteError, Stepper, StepResult
from gpt2.train.trainer import TrainingRun
from numerics.diagnose.loss_files import LossCurve
from ra.settings import AlternationSettings
from ra.variants import variant
from scripts.record.replay import RunReplay

FROZEN, SGD, UNFUSED = "no update", "SGD", "unfused AdamW"
PHASES = (FROZEN, SGD, UNFUSED)
AfterStep = Callable[[int, Stepper], None]


@dataclass(frozen=True)
class Played:
    """Losses and gradient norms by step, from 1. failed: the step whose loss or gradient is not finite, or None."""

    losses: Mapping[int, float]
    norms: Mapping[int, float]
    failed: int | None = None

    def curve(self, name: str) -> LossCurve:
        bad = {self.failed: math.nan} if self.failed else {}
        return LossCurve(name, dict(self.losses) | bad, dict(self.norms))

    def to_json(self) -> dict[str, Any]:
        rows = [[step, loss, self.norms[step]] for step, loss in self.losses.items()]
        return {"steps": rows, "failed": self.failed}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Played:
        rows = found["steps"]
        return cls({row[0]: row[1] for row in rows}, {row[0]: row[2] for row in rows}, found["failed"])


@dataclass
class Player:
    """A run that can be played from its state after `start` steps, any number of times."""

    run: TrainingRun
    resolved: ResolvedTarget
    dropout: float
    planned: int
    start: int = 0
    state: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.state = copy.deepcopy(self.run.stepper.state())

    @classmethod
    def of_replay(cls, replay: RunReplay) -> Player:
        return cls(replay.run, replay.resolved, replay.config.model.dropout, replay.planned, replay.start)

    def play(
        self, last: int, words: str = "", phase: str = "", after: AfterStep = lambda step, stepper: None
    ) -> Played:
        """Train up to step `last`, or up to the step that is not finite. words: of numerics.fix.

        after: called after each step with its number.
        """
        stepper = self.run.stepper
        stepper.load_state(copy.deepcopy(self.state))  # load_state shares the tensors of the moments
        self.run.iteration = self.start
        words = " ".join(filter(None, [words, "small:adamw" if phase == UNFUSED else ""]))
        losses: dict[int, float] = {}
        norms: dict[int, float] = {}
        fixes = RunFixes(stepper, words)
        try:
            with (
                other_update(stepper, phase),
                attention_kernels.attention_context(self.resolved, self.dropout),
                self.run.feed() as feed,
            ):
                for iteration in range(self.start, last):
                    result = stepper.step(feed.get(), iteration, self.planned)
                    losses[iteration + 1], norms[iteration + 1] = _numbers(result)
                    after(iteration + 1, stepper)
        except NotFiniteError:
            stepper.optimizer.zero_grad(set_to_none=True)
            return Played(losses, norms, len(losses) + self.start + 1)
        except RuntimeError as error:
            if not words:
                raise
            raise UserError(f"the fixed step fails: {one_line(error)}") from error  # no kernel, no memory
        finally:
            fixes.undo()
        return Played(losses, norms)


def _numbers(result: StepResult) -> tuple[float, float]:
    return result.loss, result.gradient_norm


@contextlib.contextmanager
def other_update(stepper: Stepper, phase: str) -> Iterator[None]:
    """Within the block, the optimizer makes no update, or one by SGD.

    SGD scales each gradient to a root mean square of 1, so that its updates have the size of Adam's.
    """
    before = stepper.optimizer
    if phase == FROZEN:
        vars(before)["step"] = lambda *args, **kwargs: None
    elif phase == SGD:
        groups = [
            {"params": group["params"], "lr_multiplier": group["lr_multiplier"]}
            for group in before.param_groups
        ]
        stepper.optimizer = torch.optim.SGD(groups, lr=stepper.settings.learning_rate)
        stepper.optimizer.register_step_pre_hook(_scale_gradients)
    try:
        yield
    finally:
        vars(before).pop("step", None) if phase == FROZEN else None
        stepper.optimizer = before


def _scale_gradients(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(parameter.grad.square().mean().sqrt().clamp(min=1e-30))


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run: entries of its .config, and the decisions of its study."""

    entries: Mapping[str, Entry]
    variant: str
    seed: int
    iterations: int
    micro: int
    dtype: str
    device: str
    warmup: int | None = None
    ranks: int = 1

    @classmethod
    def of_run(cls, run_dir: Path, record: RunRecord, entries: Mapping[str, Entry]) -> RunSettings:
        assert record.batch
        assert record.schedule
        assert record.target
        return cls(
            entries,
            record.variant,
            record.seed,
            record.schedule.iterations,
            record.batch.micro,
            record.target.dtype,
            "cpu" if record.target.name == "cpu" else "auto",
            record.schedule.warmup_iterations,
            record.batch.world_size,
        )

    def player(self, scratch: Path) -> Player:
        """Return the run from its initial weights. scratch: a folder that is not written to.

        UserError or ValueError where the settings make no run.
        """
        symbols = Symbols("settings", self.entries)
        config = Config.from_symbols(symbols)
        target = dataclasses.replace(config.target, name=self.device, dtype=self.dtype)
        config = dataclasses.replace(config, target=target)
        resolved = attention_kernels.prepare_device(target, config.model)
        effective = config.batch.effective
        # plan_batch refuses a share that is not whole
        micro = math.gcd(effective // self.ranks, self.micro) or 1
        batch = plan_batch(effective, micro, self.ranks, config.model.block_size)
        chosen = variant(self.variant, config.model, AlternationSettings.from_symbols(symbols))
        plan = RunPlan(
            scratch,
            "bisect",
            self.variant,
            self.seed,
            self.iterations,
            batch,
            warmup_iterations=self.warmup,
        )
        run = TrainingRun(plan, chosen.configure(config), resolved, chosen.parts, Stop(), shared=config)
        run.stepper.simulated_ranks = self.ranks
        return Player(run, resolved, config.model.dropout, self.iterations)
