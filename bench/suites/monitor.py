"""Measure what monitoring a training step costs: `make bench SUITE=monitor`.

The step without a monitor and those with one take turns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from bench.observed_step import ITERATIONS, ObservationMode, ObservedShape, ObservedSuite
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


def share(monitored: float, plain: float, mode: ObservationMode) -> float:
    return (monitored / plain - 1) / mode.every


OBSERVED = ObservedSuite(
    "monitor",
    "cost of monitoring training steps, and whether their numbers stay the same",
    mode("not monitored"),
    (
        mode("gradients and weights, every 10 steps", "grad", "param", every=10, goal=0.02),
        mode("moments and updates, every step", "adam", "update"),
        mode("attention, every step", "attention"),
        mode("activations and their gradients, every step", "actv", "actv_grad"),
        mode("everything, every step", "all", goal=0.25),
    ),
    (
        ObservedShape("124m-t256x2", 12, 12, 768, 256, 2),
        ObservedShape("124m-t1024x2", 12, 12, 768, 1024, 2),
    ),
    cost=share,
    plain_cost="0",
    head=("monitored", "CPU seconds", "cost, CPU", "cost, wall"),
    title="; cost as a fraction of a step",
)
SUITE = OBSERVED.suite()
