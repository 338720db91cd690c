"""Measure what recording a training step costs: `make bench SUITE=recorder`.

One process on one thread. The step without a recorder and those with one take turns.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.case_step import kernels, make_stepper, model_config, random_batch
from bench.cases import BASELINE, Sizes, find_shapes
from bench.runner import LIMIT_SECONDS
from bench.suite import Session, Suite, SuiteResult
from bench.tables import INTERVAL, ResultTable, format_spread, spread
from bench.workers import Worker
from gpt2.config.config import ANY_TARGET
from gpt2.hardware import attention_kernels
from gpt2.train.step import Stepper, StepResult
from numerics.debugger import StopAtOptimizer
from numerics.record_config import RecorderConfig
from numerics.recorder import Recorder
from study.executors.child_process import KEEP_HEAP

ITERATIONS = 10**9  # of the schedule: a constant rate
WARM_UP_STEPS = 2
PLAIN = "not recorded"


@dataclass(frozen=True)
class Mode:
    """One way to record. goal: largest ratio of the step's time to that of the step without a recorder."""

    name: str
    level: str = "L0"
    summary: str = "statistics"
    goal: float | None = None


MODES = (
    Mode("L0, statistics", goal=1.3),
    Mode("L0, hash", summary="md5", goal=1.5),
    Mode("mix, statistics", level="mix"),
)


@dataclass(frozen=True)
class RecordedShape(Sizes):
    """A model, and the sequences of the recorded step."""

    sequences: int


SHAPES = (
    RecordedShape("124m-t256x2", 12, 12, 768, 256, 2),
    RecordedShape("124m-t256x1", 12, 12, 768, 256, 1),
)


class RecordedStep:
    """The optimizer step of B, with and without a recorder."""

    def __init__(self, shape: RecordedShape) -> None:
        self.resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
        torch.set_num_threads(1)
        self.stepper: Stepper = make_stepper(shape, BASELINE, shape.sequences, self.resolved)
        self.ids_ET = random_batch(shape, shape.sequences, self.resolved.device)

    def run(self, mode: Mode | None) -> tuple[StepResult, float, float]:
        """Return the result of one step, and its seconds of wall time and of CPU time, with writing the record."""
        with tempfile.TemporaryDirectory() as folder, kernels(BASELINE, self.resolved):
            wall, cpu = time.perf_counter(), time.process_time()
            if mode is None:
                result = self.stepper.step(self.ids_ET, 0, ITERATIONS)
            else:
                config = RecorderConfig(dump_path=folder, level=mode.level, summary_mode=mode.summary)
                recorder = Recorder(config)
                recorder.start(self.stepper.model)
                result = self.stepper.step(self.ids_ET, 0, ITERATIONS, StopAtOptimizer(recorder))
                recorder.step()
            return result, time.perf_counter() - wall, time.process_time() - cpu

    def differing(self) -> list[str]:
        """Return the modes whose step has another loss, gradient norm or weight than the step without a recorder."""
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


def measure(shape: RecordedShape, rounds: int) -> dict[str, Any]:
    """Time every mode once a round. Call in a worker."""
    step = RecordedStep(shape)
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
        with Worker(f"recorder, {shape.name}", KEEP_HEAP) as worker:
            limit = LIMIT_SECONDS * max(1, session.rounds)
            results.append(worker.call(measure, shape, session.rounds, limit_seconds=limit))
        session.save({"shapes": results})
    return SuiteResult({"shapes": results}, tuple(map(table, results)))


def ratios(samples: Sequence[dict[str, Any]], name: str, clock: str) -> list[float]:
    """Return the ratio of a mode to the step without a recorder in each round."""
    of = {case: [sample[clock] for sample in samples if sample["case"] == case] for case in (PLAIN, name)}
    return [recorded / plain for recorded, plain in zip(of[name], of[PLAIN], strict=True)]


def table(result: dict[str, Any]) -> ResultTable:
    samples, differing = result["samples"], result["differing"]
    seconds = spread([sample["cpu"] for sample in samples if sample["case"] == PLAIN])
    cells = [(PLAIN, format_spread(seconds), "1", "1", "-", "-")]
    for mode in MODES:
        cpu, wall = (spread(ratios(samples, mode.name, clock)) for clock in ("cpu", "wall"))
        own = spread([sample["cpu"] for sample in samples if sample["case"] == mode.name])
        goal = "-" if mode.goal is None else f"{mode.goal:g}"
        same = "differ" if mode.name in differing else "equal"
        cells.append((mode.name, format_spread(own), format_spread(cpu), format_spread(wall), goal, same))
    head = ("recorded", "CPU seconds", "CPU ratio", "wall ratio", "goal", "loss, gradient norm, weights")
    return ResultTable(
        f"one optimizer step of {result['shape']}, one thread",
        head,
        tuple(cells),
        (f"median and {INTERVAL}",),
    )


SUITE = Suite(
    "recorder",
    "cost of recording a training step, and whether its numbers stay the same",
    run,
    shape="part of the shape's name: 124m-t256x2 or 124m-t256x1",
    rounds={"cpu": 6, "card": 6},
)
