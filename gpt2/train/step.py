"""One optimizer step: the effective batch in micro-batches, clipped, checked, applied.

Training, the planner's timing, the equivalence control and the benchmarks all make their steps here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gpt2.config.batch import BatchPlan
from gpt2.config.config import ModelConfig, OptimizerConfig
from gpt2.model.init import initialise, keyed_attention
from gpt2.model.loss import chunk_loss, linear_cross_entropy
from gpt2.model.transformer import GPT2
from gpt2.system.errors import UserError
from gpt2.train.optimizer import (
    Progress,
    decay_start,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    warmup_iterations,
)

Attention = Callable[[int], nn.Module]
Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class Phases(Protocol):
    """What measures a step by phase: gpt2.train.peak_memory.PeakMeter, or a tracker's marks."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...


class NotFiniteError(UserError, ArithmeticError):
    """Loss or gradient is NaN or infinite; the optimizer has not been applied.

    retry: whether going on from the last checkpoint has not been tried yet.
    """

    def __init__(self, message: str, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


def build_model(config: ModelConfig, attention: Attention | None, seed: int = 0) -> GPT2:
    """The model of the configuration on the CPU, its weights not yet initialised.

    seed: of what an attention draws of its own in its constructor; torch's global generator is left as it is.
    """
    return GPT2(
        layers=config.layers,
        heads=config.heads,
        width=config.width,
        block_size=config.block_size,
        vocabulary=config.vocabulary,
        padded_vocabulary=config.padded_vocabulary,
        dropout=config.dropout,
        attention=keyed_attention(attention, seed),
    )


def autocast(device: str, dtype: str) -> AbstractContextManager[Any]:
    """The precision that forward passes run in: bfloat16 autocast, or plain float32."""
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=getattr(torch, dtype))


@dataclass
class StepResult:
    """Mean loss in nats over the effective batch and the gradient's norm before clipping."""

    loss: float
    gradient_norm: float
    rate: float


class Stepper:
    """Model, optimizer and how to move them by one step; everything that a checkpoint must hold of them."""

    def __init__(
        self,
        model_config: ModelConfig,
        optimizer_config: OptimizerConfig,
        batch: BatchPlan,
        *,
        seed: int,
        device: str,
        dtype: str,
        compile: bool,
        attention: Attention | None,
        alter: Callable[[GPT2], None] | None = None,
        loss: Loss | None = None,
        warmup: int | None = None,
    ) -> None:
        """`alter` may change the initial weights before the optimizer sees them (the equivalence control does).

        `loss` replaces linear_cross_entropy by another function of its arguments, to compare it with.
        `warmup`: iterations of "wsd", where the plan says how many; otherwise a fraction of those planned.
        """
        self.settings = optimizer_config
        self.warmup = warmup
        self.batch = batch
        self.seed = seed
        self.device = device
        self.dtype = dtype
        self.compile = compile
        self.loss = loss or self._own_loss()
        self.model = build_model(model_config, attention, seed)
        initialise(self.model, seed)
        if alter:
            alter(self.model)
        if torch.device(device).type != "cpu":  # it was built there
            self.model.to(device)
        self.optimizer = make_optimizer(
            self.model,
            learning_rate=optimizer_config.learning_rate,
            betas=(optimizer_config.beta1, optimizer_config.beta2),
            epsilon=optimizer_config.epsilon,
            weight_decay=optimizer_config.weight_decay,
        )
        self._told: list[Any] = [module for module in self.model.modules() if hasattr(module, "begin_step")]
        self._kinded: list[Any] = [
            module for module in self.model.modules() if hasattr(module, "kind_of_step")
        ]
        self._kinds_made: set[Hashable] = set()  # of steps, by this process
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._hidden = torch.compile(self.model.hidden) if compile else self.model.hidden

    def _own_loss(self) -> Loss:
        """Between its products it is compiled where the model is; nothing is compiled before the first step."""
        if not self.compile:
            return linear_cross_entropy
        return functools.partial(linear_cross_entropy, chunk=torch.compile(chunk_loss))

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.device, self.dtype)

    def compiles(self, iteration: int) -> bool:
        """Whether step `iteration` would be compiled: the first of its kind that this process makes."""
        return self.compile and self._kind(iteration) not in self._kinds_made

    def _kind(self, iteration: int) -> Hashable:
        return tuple(module.kind_of_step(iteration) for module in self._kinded)

    def step(
        self, ids_ET: Tensor, iteration: int, iterations: int, meter: Phases | None = None
    ) -> StepResult:
        """Train on the effective batch ids_ET (E, T+1) as step `iteration` of `iterations`.

        Raises NotFiniteError before the optimizer is applied.
        """
        self.model.train()
        phase = meter.phase if meter else lambda name: contextlib.nullcontext()
        self.seed_dropout(iteration)
        self._kinds_made.add(self._kind(iteration))
        for module in self._told:
            module.begin_step(iteration)
        total = torch.zeros(
            (), device=self.device, dtype=torch.float64 if self.device == "cpu" else torch.float32
        )
        for micro_ids in ids_ET.split(self.batch.micro):
            with phase("forward"), self.autocast():
                hidden = self._hidden(micro_ids[:, :-1].contiguous())
                loss = self.loss(hidden, self.model.head, micro_ids[:, 1:], self.model.vocabulary)
            del hidden
            with phase("backward"):
                (loss / self.batch.accumulation).backward()
            total += loss.detach()
            del loss
        with phase("optimizer"):
            return self._apply(total, iteration, iterations)

    def _apply(self, total: Tensor, iteration: int, iterations: int) -> StepResult:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        loss, gradient_norm = torch.stack([total / self.batch.accumulation, norm.to(total.dtype)]).tolist()
        if not (abs(loss) < float("inf") and gradient_norm < float("inf")):  # false for NaN as well
            raise NotFiniteError(
                f"iteration {iteration}: loss {loss}, gradient norm {gradient_norm}; the usual remedy is a smaller "
                "CONFIG_LEARNING_RATE or a longer CONFIG_WARMUP_FRACTION"
            )
        if gradient_norm + 1e-6 > 0.99 * self.settings.grad_clip > 0:  # below, torch's factor is 1
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.settings.grad_clip, norm)
        rate = self.rate(iteration, iterations)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, gradient_norm, rate)

    def rate(self, iteration: int, iterations: int) -> float:
        """The learning rate of step `iteration` of `iterations`; for "wsd" exact in both, see optim.learning_rate."""
        settings, wsd = self.settings, self.settings.schedule == "wsd"
        progress: Progress = (iteration + 1) / iterations
        warmup: Progress = settings.warmup_fraction
        if wsd:
            progress = Fraction(iteration + 1, iterations)
            warmup = Fraction(self.warmup_iterations(iterations), iterations)
        return learning_rate(
            progress,
            peak=settings.learning_rate,
            warmup_fraction=warmup,
            minimum_ratio=settings.min_learning_rate_ratio,
            schedule=settings.schedule,
            decay_fraction=1 - Fraction(self.decay_start(iterations), iterations) if wsd else 0.0,
        )

    def warmup_iterations(self, iterations: int) -> int:
        if self.warmup is not None:
            return self.warmup
        return warmup_iterations(iterations, self.settings.warmup_fraction)

    def decay_start(self, iterations: int) -> int:
        """Iterations before the decay of "wsd"."""
        return decay_start(iterations, self.settings.decay_fraction, self.warmup_iterations(iterations))

    def seed_dropout(self, iteration: int) -> None:
        """Dropout is a pure function of (seed, iteration, micro-batch), so a resumed run needs no generator state.

        The split matters because a generator gives a smaller micro-batch other numbers; without dropout it does not.
        """
        if self.model.dropout:
            digest = hashlib.sha256(f"dropout:{self.seed}:{iteration}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
