"""Run one optimizer step: the effective batch in micro-batches, gradients clipped, checked and applied.

Training, step timing, the equivalence control and the benches all run their steps here.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import torch
from torch import Tensor

from gpt2 import gradients
from gpt2.initial_weights import derive_seed, initialise, keyed_parts
from gpt2.loss import (
    CARD_ROWS,
    Loss,
    RowLosses,
    even_rows,
    fast_loss,
    linear_cross_entropy,
    standard_loss,
    target_losses,
    target_losses_sliced,
)
from gpt2.optimizer import (
    AdamW,
    Progress,
    decay_start,
    learning_rate,
    parameter_groups,
    set_learning_rate,
    warmup_iterations,
)
from gpt2.transformer import GPT2, ModelParts
from runtime import ranks
from runtime.batch_plan import BatchPlan
from runtime.errors import UserError, one_line, out_of_memory
from runtime.settings import ModelConfig, OptimizerConfig


class StepObserver:
    """Called at fixed points of each step. An observer changes no number of it. This one does nothing."""

    def step(self, number: int) -> AbstractContextManager[None]:
        """Enter around a step; number: its `iteration` in metrics.jsonl, from 1."""
        return contextlib.nullcontext()

    def forward(self, repeat: Callable[[], None] | None) -> AbstractContextManager[None]:
        """Enter around forward and backward of all micro-batches.

        repeat: runs them without torch.compile and discards the gradients; None where the step is not compiled. Hooks
        of modules have no effect in a compiled step.
        """
        return contextlib.nullcontext()

    def unreduced(self) -> None:
        """The parameters have the gradients of this rank."""

    def reduced(self, loss: float, gradient_norm: float) -> None:
        """The parameters have the gradients of all ranks. Neither value need be finite."""

    def clipped(self) -> None:
        """The parameters have the gradients that the optimizer receives."""

    def update(self) -> AbstractContextManager[None]:
        """Enter around the optimizer."""
        return contextlib.nullcontext()


class StopBeforeUpdate(StepObserver):
    """Calls `stop` before the gradients of ranks are summed and the optimizer releases them."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self.stop = stop

    def unreduced(self) -> None:
        self.stop()


class Phases(Protocol):
    """Measures a step by phase: gpt2.measured_memory.PeakMeter, or PhaseMarks of the allocation tracker."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...


def no_phase(name: str) -> AbstractContextManager[None]:
    """Measure nothing."""
    return contextlib.nullcontext()


class NotFiniteError(UserError, ArithmeticError):
    """Loss or gradient is NaN or infinite; the optimizer was not applied.

    retry: whether to retry from the last checkpoint, because it has not been tried.
    """

    def __init__(self, message: str, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


def build_model(config: ModelConfig, parts: ModelParts | None = None, seed: int = 0) -> GPT2:
    """Build the configured model on the CPU with unset weights.

    Random draws of a part's constructor are a function of (seed, part, layer); torch's generator is unchanged.
    """
    return GPT2(
        layers=config.layers,
        heads=config.heads,
        width=config.width,
        block_size=config.block_size,
        vocabulary=config.vocabulary,
        padded_vocabulary=config.padded_vocabulary,
        dropout=config.dropout,
        parts=keyed_parts(parts or ModelParts(), seed),
    )


def autocast(device: str, dtype: str) -> AbstractContextManager[Any]:
    """Return the context of forward passes: bfloat16 autocast, or nothing for float32."""
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=getattr(torch, dtype))


@dataclass
class StepResult:
    """Mean loss in nats over the effective batch, gradient norm before clipping, and learning rate."""

    loss: float
    gradient_norm: float
    rate: float


class Stepper:
    """Model and optimizer, and the step that updates them. `state` is what a checkpoint must contain."""

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
        parts: ModelParts | None,
        warmup: int | None = None,
        bfloat16_residual: bool = False,
    ) -> None:
        """Build model and optimizer. warmup: iterations of "wsd"; None: a fraction of the planned ones."""
        self.settings = optimizer_config
        self.warmup = warmup
        self.simulated_ranks = 1  # in a replay of a run of several ranks: their number
        self.batch = batch
        self.seed = seed
        self.device = device
        self.dtype = dtype
        self.compile = compile
        self.observer = StepObserver()
        self.loss: Loss = standard_loss() if compile else linear_cross_entropy  # the first step compiles it
        self.notes: list[str] = []  # why a card does not use the faster loss
        self.model = build_model(model_config, parts, seed)
        self.model.bfloat16_residual = bfloat16_residual
        initialise(self.model, seed)
        if torch.device(device).type != "cpu":  # built on the CPU
            self.model.to(device)
            if compile:
                head, kind = self.model.head, getattr(torch, dtype)
                sizes = (head.shape[0], self.model.vocabulary)
                self.loss, note = compiled_loss(
                    device, kind, batch.micro * batch.block_size, head.shape[1], *sizes
                )
                self.model.row_losses, other = compiled_row_losses(device, kind, *sizes)
                self.notes += filter(None, [note, other])
        self.optimizer: torch.optim.Optimizer = AdamW(
            parameter_groups(self.model, optimizer_config.weight_decay),
            lr=optimizer_config.learning_rate,
            betas=(optimizer_config.beta1, optimizer_config.beta2),
            eps=optimizer_config.epsilon,
            fused=True,
        )
        modules: list[Any] = list(self.model.modules())
        named: list[tuple[str, Any]] = list(self.model.named_modules())
        self._noisy_modules = [(name, module) for name, module in named if hasattr(module, "draw_noise")]
        self._begin_step_modules = [module for module in modules if hasattr(module, "begin_step")]
        self._kind_modules = [module for module in modules if hasattr(module, "kind_of_step")]
        self._random = self.model.dropout > 0 or any(
            getattr(module, "stochastic", False) for module in modules
        )
        self._finished_kinds: set[Hashable] = set()  # kinds of steps that this process has run
        self.parameters: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        self._hidden = torch.compile(self.model.hidden) if compile else self.model.hidden

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of forward passes."""
        return autocast(self.device, self.dtype)

    def compiles(self, iteration: int) -> bool:
        """Whether step `iteration` compiles: it is the first of its kind in this process."""
        return self.compile and self._kind(iteration) not in self._finished_kinds

    def _kind(self, iteration: int) -> Hashable:
        return tuple(module.kind_of_step(iteration) for module in self._kind_modules)

    def step(
        self, ids_ET: Tensor, iteration: int, iterations: int, meter: Phases | None = None
    ) -> StepResult:
        """Train on the effective batch ids_ET (E, T+1) as step `iteration` of `iterations`.

        Of several ranks, each has its share of the sequences. Raises NotFiniteError before the optimizer is applied.
        """
        self.begin(iteration, iterations)
        phase = meter.phase if meter else no_phase
        micro_batches = ids_ET.split(self.batch.micro)
        count = len(micro_batches)

        def backward(number: int, eager: bool = False) -> Tensor:
            self.seed_dropout(iteration, ranks.rank() * count + number)
            with phase("forward"):
                loss = self.loss_of(micro_batches[number], eager)
            with phase("backward"):
                (loss / self.batch.micro_batches).backward()
            return loss.detach().to(torch.float64 if self.device == "cpu" else torch.float32)

        with self.observer.forward(self._repeat(backward, count) if self.compile else None):
            total = ranks.together(
                lambda: gradients.accumulate(backward, count, self.parameters, self.simulated_ranks)
            )
        with phase("optimizer"):
            self.observer.unreduced()
            gradients.sum_over_ranks(self.parameters, total)
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
            values = torch.stack([total / self.batch.micro_batches, norm.to(total.dtype)])
            loss, gradient_norm = values.tolist()  # waits for the device
            self.observer.reduced(loss, gradient_norm)
            if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
                raise NotFiniteError(
                    f"iteration {iteration}: loss {loss}, gradient norm {gradient_norm}; fix: a smaller "
                    "CONFIG_LEARNING_RATE or a longer CONFIG_WARMUP_FRACTION"
                )
            limit = self.settings.grad_clip
            if gradient_norm + 1e-6 > 0.99 * limit > 0:  # below this norm torch's factor is 1
                torch.nn.utils.clip_grads_with_norm_(self.parameters, limit, norm)
            self.observer.clipped()
            rate = self.rate(iteration, iterations)
            set_learning_rate(self.optimizer, rate)
            with self.observer.update():
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, gradient_norm, rate)

    def begin(self, iteration: int, iterations: int) -> None:
        """Prepare the modules for step `iteration` of `iterations`."""
        self.model.train()
        self._finished_kinds.add(self._kind(iteration))
        for module in self._begin_step_modules:
            module.begin_step(iteration)
        for name, module in self._noisy_modules:
            module.draw_noise(name, self.seed, iteration, iterations)

    def loss_of(self, micro_ids: Tensor, eager: bool = False) -> Tensor:
        """Compute the mean loss of the sequences micro_ids (micro, T+1). eager: without torch.compile and fixes."""
        hidden_of, loss = (self.model.hidden, linear_cross_entropy) if eager else (self._hidden, self.loss)
        with self.autocast():
            hidden = hidden_of(micro_ids[:, :-1].contiguous())
            return loss(hidden, self.model.head, micro_ids[:, 1:], self.model.vocabulary)

    def _repeat(self, backward: Callable[[int, bool], Tensor], count: int) -> Callable[[], None]:
        def repeat() -> None:
            try:
                for number in range(count):
                    backward(number, True)
            finally:
                self.optimizer.zero_grad(set_to_none=True)

        return repeat

    def rate(self, iteration: int, iterations: int) -> float:
        """Return the learning rate of step `iteration` of `iterations`; exact for "wsd" (see learning_rate)."""
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
        """Return the warm-up iterations of a run of `iterations`."""
        if self.warmup is not None:
            return self.warmup
        return warmup_iterations(iterations, self.settings.warmup_fraction)

    def decay_start(self, iterations: int) -> int:
        """Return the iterations before the decay of "wsd"."""
        return decay_start(iterations, self.settings.decay_fraction, self.warmup_iterations(iterations))

    def seed_dropout(self, iteration: int, number: int) -> None:
        """Seed dropout, and attentions with `stochastic = True`, for micro-batch `number` of the effective batch.

        The seed is a function of (seed, iteration, number), so that resuming needs no state and the number of ranks
        changes nothing. Another micro-batch size gives other draws.
        """
        if self._random:
            of = (iteration, number) if number else (iteration,)
            torch.manual_seed(derive_seed("dropout", self.seed, *of))

    def clear_noise(self) -> None:
        """Remove the noise of the last step, so that training mode computes what evaluation does."""
        for _, module in self._noisy_modules:
            module.clear_noise()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


# Losses on a card, compiled where they agree with eager code


LOSS_LIMIT = 2e-3  # nats
ROW_LIMIT = 1e-3  # nats of a row, from the same logits
ROWS_COMPARED = 256
GRADIENT_LIMIT = 0.02  # distance from that of eager code, in its length; bfloat16 rounds to 0.004


@functools.cache
def compiled_loss(
    device: str, dtype: torch.dtype, rows: int, width: int, padded: int, vocabulary: int
) -> tuple[Loss, str]:
    """Return the loss of a step on a card, and why it is not the faster one, if so. Compares them once.

    rows: of a micro-batch. width, padded: of the head.
    """
    fast = fast_loss()
    reason = disagreement(fast, device, dtype, even_rows(rows, CARD_ROWS), width, padded, vocabulary)
    return (standard_loss(), f"the standard head is used: {reason}") if reason else (fast, "")


def disagreement(
    fast: Loss, device: str, dtype: torch.dtype, rows: int, width: int, padded: int, vocabulary: int
) -> str:
    """Compare a loss with that of eager code on random rows; return how it differs, "" where it agrees."""
    draw = torch.Generator().manual_seed(0)
    x_NC = torch.randn(rows, width, generator=draw).to(device)
    weight_VC = (torch.randn(padded, width, generator=draw) / width**0.5).to(device)
    targets_N = torch.randint(vocabulary, (rows,), generator=draw).to(device)
    found = []
    try:
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32):
            for loss in (fast, linear_cross_entropy):
                leaves = [part.detach().requires_grad_() for part in (x_NC, weight_VC)]
                value = loss(leaves[0], leaves[1], targets_N, vocabulary)
                found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        return one_line(error)
    (value, *gradients), (exact, *exact_gradients) = found
    pairs = zip(gradients, exact_gradients, strict=True)
    distances = [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]
    off = abs(float(value - exact))
    if off <= LOSS_LIMIT and max(distances) <= GRADIENT_LIMIT:  # false for NaN
        return ""
    return f"the faster one differs by {off:.1e} nats, its gradients by {max(distances):.1e}"


@functools.cache
@torch.no_grad()
def compiled_row_losses(
    device: str, dtype: torch.dtype, padded: int, vocabulary: int
) -> tuple[RowLosses, str]:
    """Return target_losses for an evaluation on a card, compiled for any number of rows if that is right there.

    Also returns why they are not compiled, or "".
    """
    compiled = torch.compile(target_losses, dynamic=True)
    draw = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(ROWS_COMPARED, padded, generator=draw).to(device, dtype)
    targets_N = torch.randint(vocabulary, (ROWS_COMPARED,), generator=draw).to(device)
    try:
        found_N = compiled(logits_NV, targets_N, vocabulary)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        return target_losses_sliced, f"losses of evaluations are not compiled: {one_line(error)}"
    off = float((found_N - target_losses_sliced(logits_NV, targets_N, vocabulary)).abs().max())
    if off <= ROW_LIMIT:  # false for NaN
        return compiled, ""
    return (
        target_losses_sliced,
        f"losses of evaluations are not compiled: compiled, one differs by {off:.1e} nats",
    )
