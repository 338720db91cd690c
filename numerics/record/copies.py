"""Copies for a record of values: optimizer steps and calls of custom functions, beside the calls of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from numerics.record.captured_steps import StepCapture
from numerics.record.custom_functions import CustomCalls, Quietly


class Beside:
    """Copy calls of custom functions until a stack is closed, and steps of optimizers until stop()."""

    def __init__(self) -> None:
        self._steps, self._customs = StepCapture(), CustomCalls()

    def start(self, modules: Iterable[nn.Module], running: contextlib.ExitStack, quietly: Quietly) -> None:
        """modules: whose parameters have names. running: is closed before the optimizer steps. quietly: see Quietly."""
        self._steps.start(modules)
        self._customs.start(quietly)
        running.callback(self._customs.stop)

    def stop(self) -> None:
        self._steps.stop()

    def write(self, folder: Path) -> None:
        self._steps.write(folder)
        self._customs.write(folder)
