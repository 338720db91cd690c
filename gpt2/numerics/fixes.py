"""CONFIG_NUMERICS_FIX: replace chosen computations of a run, its loss and its optimizer included."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.model import cpu_linear
from gpt2.model.loss import IGNORED
from referee.errors import NumericsError
from referee.numerics.search.fix_words import UPDATES, Applied, fix
from referee.numerics.search.small_operations import cross_entropy
from runtime.errors import UserError

LOSS = "loss"  # name of the loss in a pattern
SMALL_LOSS = (f"small:{LOSS}", "small:cross_entropy")
SYMBOL = "CONFIG_NUMERICS_FIX"


Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class Fixable(Protocol):
    """gpt2.train.step.Stepper."""

    model: Any
    optimizer: torch.optim.Optimizer
    loss: Loss


class StepLoss(nn.Module):
    """The loss of a step as a module, so that a pattern can name it."""

    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden_BTC: Tensor, head_VC: Tensor, targets_BT: Tensor, vocabulary: int) -> Tensor:
        return self.function(hidden_BTC, head_VC, targets_BT, vocabulary)


def small_loss(hidden_BTC: Tensor, head_VC: Tensor, targets_BT: Tensor, vocabulary: int) -> Tensor:
    """Compute linear_cross_entropy by one product and small operations, with all logits in memory."""
    logits_BTV = F.linear(hidden_BTC, head_VC[:vocabulary])
    wide = logits_BTV if logits_BTV.element_size() > 4 else logits_BTV.float()
    return cross_entropy(wide.flatten(0, -2), targets_BT.flatten(), ignore_index=IGNORED)


class RunFixes:
    """The fixes of a run's model, loss and optimizer. UserError names a wrong word."""

    def __init__(self, stepper: Fixable, words: str) -> None:
        self.stepper, self.loss = stepper, stepper.loss
        given = words.split()
        small = [word for word in given if word in SMALL_LOSS]
        loss = StepLoss(small_loss if small else stepper.loss)
        try:
            self.applied: Applied = fix(
                stepper.model,
                [word for word in given if word not in SMALL_LOSS],
                optimizer=stepper.optimizer,
                others={LOSS: loss},
                around=standard_kernels,
            )
        except NumericsError as error:
            raise UserError(f"{SYMBOL}: {error}") from error
        changes = [*map(str, self.applied.changes)]
        changes += [f"{LOSS} by small operations"] if small else []
        changes += [UPDATES[word] for word in self.applied.updates]
        self.changes = tuple(changes) or None  # as on the record
        if small or any(change.path == LOSS for change in self.applied.changes):
            stepper.loss = loss

    def require_used(self) -> None:
        """Raise UserError where a fix had no effect in a step."""
        try:
            self.applied.require_used()
        except NumericsError as error:
            raise UserError(f"{SYMBOL}: {error}") from error

    def undo(self) -> None:
        """Restore model, loss and optimizer."""
        self.applied.undo()
        self.stepper.loss = self.loss


def check_fixes(model: nn.Module, words: str, device_type: str = "") -> None:
    """Raise UserError for a word that names nothing of the model, which is unchanged.

    device_type: of the runs; "" if unknown. A computation is not moved to the CPU where it is there without a fix.
    """
    without_names = (*SMALL_LOSS, *UPDATES)
    given = [word for word in words.split() if word not in without_names]
    try:
        fix(model, given, others={LOSS: StepLoss(small_loss)}).undo()
    except NumericsError as error:
        raise UserError(f"{SYMBOL}: {error}") from error
    for word in given:
        if device_type == "cpu" and word.startswith("cpu:"):
            raise UserError(f"{SYMBOL}: {word} has no effect: the runs compute on the CPU; fix: remove it")


@contextlib.contextmanager
def standard_kernels() -> Iterator[None]:
    """Within the block, the model calls torch's functions instead of its kernels for the CPU."""
    before = set(cpu_linear.CPU_KERNEL_DEVICES)
    cpu_linear.CPU_KERNEL_DEVICES.clear()
    try:
        yield
    finally:
        cpu_linear.CPU_KERNEL_DEVICES.update(before)
