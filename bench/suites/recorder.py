"""Measure what recording a training step costs: `make bench SUITE=recorder`.

One process on one thread. The step without a recorder and those with one take turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.case_step import kernels
from bench.cases import BASELINE
from bench.observed_step import ITERATIONS, ObservedShape, ObservedStep, pairs, run_shapes, table_of
from bench.suite import Suite, SuiteResult, SuiteSession
from bench.tables import ResultTable
from gpt2.train.step import StepResult
from numerics.debugger import StopAtOptimizer
from numerics.record_config import RecorderConfig
from numerics.recorder import Recorder

PLAIN = "not recorded"


@dataclass(frozen=True)
class RecorderMode:
    """One way to record. goal: largest ratio of the step's time to that of the step without a recorder."""

    name: str
    level: str = "L0"
    summary: str = "statistics"
    goal: float | None = None


MODES = (
    RecorderMode("L0, statistics", goal=1.3),
    RecorderMode("L0, hash", summary="md5", goal=1.5),
    RecorderMode("mix, statistics", level="mix"),
)


SHAPES = (
    ObservedShape("124m-t256x2", 12, 12, 768, 256, 2),
    ObservedShape("124m-t256x1", 12, 12, 768, 256, 1),
)


class RecorderStep(ObservedStep[RecorderMode]):
    """The optimizer step of B, with and without a recorder."""

    def run(self, mode: RecorderMode | None) -> tuple[StepResult, float, float]:
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


def measure(shape: ObservedShape, rounds: int) -> dict[str, Any]:
    """Time every mode once a round. Call in a worker."""
    return {"shape": shape.name} | RecorderStep(shape).time_modes(MODES, rounds, PLAIN)


def run(session: SuiteSession) -> SuiteResult:
    results = run_shapes(session, "recorder", SHAPES, measure)
    return SuiteResult({"shapes": results}, tuple(map(table, results)))


def ratios(samples: Sequence[dict[str, Any]], name: str, clock: str) -> list[float]:
    """Return the ratio of a mode to the step without a recorder in each round."""
    return [recorded / plain for recorded, plain in pairs(samples, name, PLAIN, clock)]


def table(result: dict[str, Any]) -> ResultTable:
    head = ("recorded", "CPU seconds", "CPU ratio", "wall ratio")
    return table_of(
        result, MODES, (PLAIN, "1"), head, lambda rows, mode, clock: ratios(rows, mode.name, clock)
    )


SUITE = Suite(
    "recorder",
    "cost of recording a training step, and whether its numbers stay the same",
    run,
    shape="part of the shape's name: 124m-t256x2 or 124m-t256x1",
    rounds={"cpu": 6, "card": 6},
)
