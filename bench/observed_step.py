"""A training step with and without something that observes it, in turns: what it costs, and whether it changes numbers.

One process on one thread. Used by the suites `recorder` and `monitor`.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.case_step import kernels, make_stepper, model_config, random_batch
from bench.cases import BASELINE, Sizes, find_shapes
from bench.runner import LIMIT_SECONDS
from bench.suite import INTERVAL, ResultTable, Suite, SuiteResult, SuiteSession, format_spread, spread
from bench.workers import BenchWorker
from gpt2.training_step import Stepper, StepResult
from runtime import attention_kernels
from runtime.settings import ANY_TARGET
from study.executors.child_process import KEEP_HEAP

ITERATIONS = 10**9  # of the schedule: a constant rate
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class ObservationMode:
    """One way to observe. prepare: (stepper, batch, empty folder) -> the step with its observer, which is timed.

    goal: its largest cost.
    """

    name: str
    prepare: Callable[[Stepper, torch.Tensor, Path], Callable[[], StepResult]]
    goal: float | None = None
    every: int = 1  # steps among which the cost is divided


@dataclass(frozen=True)
class ObservedShape(Sizes):
    """A model, and the sequences of the observed step."""

    sequences: int


class ObservedStep:
    """The optimizer step of B."""

    def __init__(self, shape: ObservedShape) -> None:
        self.resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
        torch.set_num_threads(1)
        self.stepper: Stepper = make_stepper(shape, BASELINE, shape.sequences, self.resolved)
        self.ids_ET = random_batch(shape, shape.sequences, self.resolved.device)

    def run(self, mode: ObservationMode) -> tuple[StepResult, float, float]:
        """Return the result of one step, and its seconds of wall time and of CPU time, with writing its files."""
        with tempfile.TemporaryDirectory() as folder, kernels(BASELINE, self.resolved):
            step = mode.prepare(self.stepper, self.ids_ET, Path(folder))
            wall, cpu = time.perf_counter(), time.process_time()
            result = step()
            return result, time.perf_counter() - wall, time.process_time() - cpu

    def differing(self, plain: ObservationMode, modes: Sequence[ObservationMode]) -> list[str]:
        """Return the modes whose step has another loss, gradient norm or weight than the plain one."""
        before = copy.deepcopy(self.stepper.state())
        expected, _, _ = self.run(plain)
        weights = copy.deepcopy(self.stepper.model.state_dict())
        found = []
        for mode in modes:
            self.stepper.load_state(copy.deepcopy(before))  # the optimizer takes its tensors
            result, _, _ = self.run(mode)
            now = self.stepper.model.state_dict()
            if result != expected or not all(torch.equal(weights[name], now[name]) for name in weights):
                found.append(mode.name)
        return found


@dataclass(frozen=True)
class ObservedSuite:
    """Modes beside a plain step. cost: (seconds of a mode, of the plain step, mode) -> its cost, to be pickled.

    plain_cost: that of the plain step. head: of the first four columns. title: added to that of the tables.
    """

    name: str
    help: str
    plain: ObservationMode
    modes: tuple[ObservationMode, ...]
    shapes: tuple[ObservedShape, ...]
    cost: Callable[[float, float, ObservationMode], float]
    plain_cost: str
    head: tuple[str, ...]
    title: str = ""

    def run(self, session: SuiteSession) -> SuiteResult:
        """Measure the chosen shapes, each in a new worker with the environment of a training process."""
        results: list[dict[str, Any]] = []
        for shape in find_shapes(self.shapes, session.shape):
            with BenchWorker(f"{self.name}, {shape.name}", KEEP_HEAP) as worker:
                limit = LIMIT_SECONDS * max(1, session.rounds)
                results.append(worker.call(self.measure, shape, session.rounds, limit_seconds=limit))
            session.save({"shapes": results})
        return SuiteResult({"shapes": results}, tuple(map(self.table, results)))

    def measure(self, shape: ObservedShape, rounds: int) -> dict[str, Any]:
        """Time every mode once a round, after a warm-up and the comparison of numbers. Call in a worker."""
        step = ObservedStep(shape)
        for _ in range(WARM_UP_STEPS):
            step.run(self.plain)
        differing = step.differing(self.plain, self.modes)
        samples = []
        for _ in range(rounds):
            for mode in (self.plain, *self.modes):
                _, wall, cpu = step.run(mode)
                samples.append({"case": mode.name, "wall": wall, "cpu": cpu})
        return {"shape": shape.name, "samples": samples, "differing": differing}

    def costs(self, samples: Sequence[Mapping[str, Any]], mode: ObservationMode, clock: str) -> list[float]:
        """Return the cost of a mode in each round."""
        observed, plain = (
            [sample[clock] for sample in samples if sample["case"] == name]
            for name in (mode.name, self.plain.name)
        )
        return [self.cost(one, other, mode) for one, other in zip(observed, plain, strict=True)]

    def table(self, result: Mapping[str, Any]) -> ResultTable:
        """Return a row of each mode: its seconds, its cost on both clocks, and whether the numbers stay the same."""
        samples, differing = result["samples"], result["differing"]

        def seconds(mode: ObservationMode) -> str:
            return format_spread(spread([one["cpu"] for one in samples if one["case"] == mode.name]))

        cells = [(self.plain.name, seconds(self.plain), self.plain_cost, self.plain_cost, "-", "-")]
        for mode in self.modes:
            cpu, wall = (format_spread(spread(self.costs(samples, mode, clock))) for clock in ("cpu", "wall"))
            goal = "-" if mode.goal is None else f"{mode.goal:g}"
            equal = "differ" if mode.name in differing else "equal"
            cells.append((mode.name, seconds(mode), cpu, wall, goal, equal))
        return ResultTable(
            f"one optimizer step of {result['shape']}, one thread{self.title}",
            (*self.head, "goal", "loss, gradient norm, weights"),
            tuple(cells),
            (f"median and {INTERVAL}",),
        )

    def suite(self) -> Suite:
        names = " or ".join(shape.name for shape in self.shapes)
        shape = f"part of the shape's name: {names}"
        return Suite(self.name, self.help, self.run, shape, rounds={"cpu": 6, "card": 6})
