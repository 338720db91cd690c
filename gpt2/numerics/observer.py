"""Observers of an optimizer step (gpt2.train.step)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager


class StepObserver:
    """Called at fixed points of each step. An observer changes no number of it. This one does nothing."""

    @property
    def watches_forward(self) -> bool:
        """Whether the running step is watched in forward and backward."""
        return False

    def step(self, number: int) -> AbstractContextManager[None]:
        """Enter around a step; number: its `iteration` in metrics.jsonl, from 1."""
        return contextlib.nullcontext()

    def forward(self, repeated: bool = False) -> AbstractContextManager[None]:
        """Enter around forward and backward of all micro-batches. repeated: their gradients are discarded."""
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
