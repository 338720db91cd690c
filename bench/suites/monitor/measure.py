"""Measure what monitoring a training step costs: `make bench SUITE=monitor`.

One process on one thread. The step without a monitor and those with one take turns.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.case_step import kernels, make_stepper, model_config, random_batch
from bench.cases import BASELINE, Sizes, find_shapes
from bench.runner import LIMIT_SECONDS
from bench.suite import Session, Suite, SuiteResult
from bench.tables import INTERVAL, ResultTable, format_spread, spread
from bench.workers import Worker
from gpt2.config.config import ANY_TARGET
from gpt2.config.monitor import MonitorSettings
from gpt2.hardware import attention_kernels
from gpt2.numerics.monitoring import RunMonitor
from gpt2.numerics.observer import StepObserver
from gpt2.train.step import Stepper, StepResult
from study.executors.child_process import KEEP_HEAP

ITERATIONS = 10**9  # of the schedule: a constant rate
WARM_UP_STEPS = 2
PLAIN = "not monitored"


@dataclass(frozen=True)
class Mode:
    """What is monitored in a step. every: steps among which its cost is divided. goal: largest cost, of a step."""

    name: str
    targets: tuple[str, ...]
    every: int = 1
    goal: float | None = None


MODES = (
    Mode("gradients and weights, every 10 steps", ("grad", "param"), 10, 0.02),
    Mode("moments and updates, every step", ("adam", "update")),
    Mode("attention, every step", ("attention",)),
    Mode("activations and their gradients, every step", ("actv", "actv_grad")),
    Mode("everything, every step", ("all",), goal=0.25),
)


@dataclass(frozen=True)
class MonitoredShape(Sizes):
    """A model, and the sequences of the monitored step."""

    sequences: int


SHAPES = (
    MonitoredShape("124m-t256x2", 12, 12, 768, 256, 2),
    MonitoredShape("124m-t1024x2", 12, 12, 768, 1024, 2),
)


class MonitoredStep:
    """The optimizer step of B, with and without a monitor."""

    def __init__(self, shape: MonitoredShape) -> None:
        self.resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
        torch.set_num_threads(1)
        self.stepper: Stepper = make_stepper(shape, BASELINE, shape.sequences, self.resolved)
        self.ids_ET = random_batch(shape, shape.sequences, self.resolved.device)

    def run(self, mode: Mode | None) -> tuple[StepResult, float, float]:
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

    def differing(self) -> list[str]:
        """Return the modes whose step has another loss, gradient norm or weight than the step without a monitor."""
        before = copy.deepcopy(self.stepper.state())
        expected, _, _ = self.run(None)
        weights = copy.deepcopy(self.stepper.model.state_dict())
        found = []
        for mode in MODES:
            self.stepper.load_state(copy.deepcopy(before))  # the optimizer takes its tensors
            result, _, _ = self.run(mode)
            now = self.stepper.model.state_dict()
            if result != expected or not all(torch.equal(weights[name], now[name]) for name in weights):
                found.append(mode.name)
        return found


def measure(shape: MonitoredShape, rounds: int) -> dict[str, Any]:
    """Time every mode once a round. Call in a worker."""
    step = MonitoredStep(shape)
    for _ in range(WARM_UP_STEPS):
        step.run(None)
    differing = step.differing()
    samples = []
    for _ in range(rounds):
        for mode in (None, *MODES):
            _, wall, cpu = step.run(mode)
            samples.append({"case": mode.name if mode else PLAIN, "wall": wall, "cpu": cpu})
    return {"shape": shape.name, "samples": samples, "differing": differing}


def run(session: Session) -> SuiteResult:
    """Measure the shapes, each in a new worker with the environment of a training process."""
    results = []
    for shape in find_shapes(SHAPES, session.shape):
        with Worker(f"monitor, {shape.name}", KEEP_HEAP) as worker:
            limit = LIMIT_SECONDS * max(1, session.rounds)
            results.append(worker.call(measure, shape, session.rounds, limit_seconds=limit))
        session.save({"shapes": results})
    return SuiteResult({"shapes": results}, tuple(map(table, results)))


def costs(samples: Sequence[dict[str, Any]], mode: Mode, clock: str) -> list[float]:
    """Return the cost of a mode in each round, as a fraction of the step without a monitor."""
    of = {case: [one[clock] for one in samples if one["case"] == case] for case in (PLAIN, mode.name)}
    return [
        (monitored / plain - 1) / mode.every
        for monitored, plain in zip(of[mode.name], of[PLAIN], strict=True)
    ]


def table(result: dict[str, Any]) -> ResultTable:
    samples, differing = result["samples"], result["differing"]
    seconds = spread([sample["cpu"] for sample in samples if sample["case"] == PLAIN])
    cells = [(PLAIN, format_spread(seconds), "0", "0", "-", "-")]
    for mode in MODES:
        cpu, wall = (spread(costs(samples, mode, clock)) for clock in ("cpu", "wall"))
        own = spread([sample["cpu"] for sample in samples if sample["case"] == mode.name])
        goal = "-" if mode.goal is None else f"{mode.goal:g}"
        same = "differ" if mode.name in differing else "equal"
        cells.append((mode.name, format_spread(own), format_spread(cpu), format_spread(wall), goal, same))
    head = ("monitored", "CPU seconds", "cost, CPU", "cost, wall", "goal", "loss, gradient norm, weights")
    return ResultTable(
        f"one optimizer step of {result['shape']}, one thread; cost as a fraction of a step",
        head,
        tuple(cells),
        (f"median and {INTERVAL}",),
    )


SUITE = Suite(
    "monitor",
    "cost of monitoring training steps, and whether their numbers stay the same",
    run,
    shape="part of the shape's name: 124m-t256x2 or 124m-t1024x2",
    rounds={"cpu": 6, "card": 6},
)
