"""Measure what monitoring a training step costs: `make bench SUITE=monitor`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from bench.observed_step import ITERATIONS, ObservationMode, observed_suite
from gpt2.training_step import StepObserver, Stepper, StepResult
from gpt2.watch import RunMonitor
from runtime.settings import MonitorSettings


def monitored(
    targets: tuple[str, ...], stepper: Stepper, ids_ET: Tensor, folder: Path
) -> Callable[[], StepResult]:
    """Return the step with a monitor of these targets; none: without one."""
    stepper.observer = StepObserver()
    if targets:
        settings = MonitorSettings(True, 1, targets, ("nan", "spike", "grad_norm"))
        stepper.observer = RunMonitor(settings, stepper.model, stepper.optimizer, folder, print)

    def step() -> StepResult:
        with stepper.observer.step(1):
            return stepper.step(ids_ET, 0, ITERATIONS)

    return step


def mode(name: str, *targets: str, every: int = 1, goal: float | None = None) -> ObservationMode:
    return ObservationMode(name, functools.partial(monitored, targets), goal, every)


MODES = (
    mode("not monitored"),
    mode("gradients and weights, every 10 steps", "grad", "param", every=10, goal=1.02),
    mode("moments and updates, every step", "adam", "update"),
    mode("attention, every step", "attention"),
    mode("activations and their gradients, every step", "actv", "actv_grad"),
    mode("everything, every step", "all", goal=1.25),
)


SUITE = observed_suite(
    "monitor", "cost of monitoring training steps, and whether their numbers stay the same", MODES
)
