"""Measure what monitoring a training step costs: `make bench SUITE=monitor`.

One process on one thread. The step without a monitor and those with one take turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.case_step import kernels
from bench.cases import BASELINE
from bench.observed_step import ITERATIONS, ObservedShape, ObservedStep, pairs, run_shapes, table_of
from bench.suite import Suite, SuiteResult, SuiteSession
from bench.tables import ResultTable
from gpt2.config.monitor import MonitorSettings
from gpt2.numerics.monitoring import RunMonitor
from gpt2.numerics.observer import StepObserver
from gpt2.train.step import StepResult

PLAIN = "not monitored"


@dataclass(frozen=True)
class MonitorMode:
    """Targets of a step. every: steps among which its cost is divided. goal: largest cost, of a step."""

    name: str
    targets: tuple[str, ...]
    every: int = 1
    goal: float | None = None


MODES = (
    MonitorMode("gradients and weights, every 10 steps", ("grad", "param"), 10, 0.02),
    MonitorMode("moments and updates, every step", ("adam", "update")),
    MonitorMode("attention, every step", ("attention",)),
    MonitorMode("activations and their gradients, every step", ("actv", "actv_grad")),
    MonitorMode("everything, every step", ("all",), goal=0.25),
)


SHAPES = (
    ObservedShape("124m-t256x2", 12, 12, 768, 256, 2),
    ObservedShape("124m-t1024x2", 12, 12, 768, 1024, 2),
)


class MonitoredStep(ObservedStep[MonitorMode]):
    """The optimizer step of B, with and without a monitor."""

    def run(self, mode: MonitorMode | None) -> tuple[StepResult, float, float]:
        """Return the result of one step, and its seconds of wall time and of CPU time, with writing the rows."""
        stepper = self.stepper
        with tempfile.TemporaryDirectory() as folder, kernels(BASELINE, self.resolved):
            stepper.observer = StepObserver()
            if mode is not None:
                settings = MonitorSettings(True, 1, mode.targets, ("nan", "spike", "grad_norm"))
                stepper.observer = RunMonitor(settings, stepper.model, stepper.optimizer, Path(folder), print)
            wall, cpu = time.perf_counter(), time.process_time()
            with stepper.observer.step(1):
                result = stepper.step(self.ids_ET, 0, ITERATIONS)
            return result, time.perf_counter() - wall, time.process_time() - cpu


def measure(shape: ObservedShape, rounds: int) -> dict[str, Any]:
    """Time every mode once a round. Call in a worker."""
    return {"shape": shape.name} | MonitoredStep(shape).time_modes(MODES, rounds, PLAIN)


def run(session: SuiteSession) -> SuiteResult:
    results = run_shapes(session, "monitor", SHAPES, measure)
    return SuiteResult({"shapes": results}, tuple(map(table, results)))


def costs(samples: Sequence[dict[str, Any]], mode: MonitorMode, clock: str) -> list[float]:
    """Return the cost of a mode in each round, as a fraction of the step without a monitor."""
    rounds = pairs(samples, mode.name, PLAIN, clock)
    return [(monitored / plain - 1) / mode.every for monitored, plain in rounds]


def table(result: dict[str, Any]) -> ResultTable:
    head = ("monitored", "CPU seconds", "cost, CPU", "cost, wall")
    return table_of(result, MODES, (PLAIN, "0"), head, costs, "; cost as a fraction of a step")


SUITE = Suite(
    "monitor",
    "cost of monitoring training steps, and whether their numbers stay the same",
    run,
    shape="part of the shape's name: 124m-t256x2 or 124m-t1024x2",
    rounds={"cpu": 6, "card": 6},
)
