"""Measure what recording a training step costs: `make bench SUITE=recorder`.

The step without a recorder and those with one take turns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from bench.observed_step import ITERATIONS, ObservationMode, ObservedShape, ObservedSuite
from gpt2.training_step import StepObserver, Stepper, StepResult, StopBeforeUpdate
from referee.numerics.record.record_settings import RecorderConfig
from referee.numerics.record.recorder import Recorder


def not_recorded(stepper: Stepper, ids_ET: Tensor, folder: Path) -> Callable[[], StepResult]:
    stepper.observer = StepObserver()
    return lambda: stepper.step(ids_ET, 0, ITERATIONS)


def recorded(
    level: str, summary: str, stepper: Stepper, ids_ET: Tensor, folder: Path
) -> Callable[[], StepResult]:
    """Return the step with a recorder, which is started and ended within the step."""
    recorder = Recorder(RecorderConfig(dump_path=str(folder), level=level, summary_mode=summary))
    stepper.observer = StopBeforeUpdate(recorder.stop)

    def step() -> StepResult:
        recorder.start(stepper.model)
        result = stepper.step(ids_ET, 0, ITERATIONS)
        recorder.step()
        return result

    return step


def mode(level: str, summary: str, name: str, goal: float | None = None) -> ObservationMode:
    return ObservationMode(name, functools.partial(recorded, level, summary), goal)


def ratio(recorded: float, plain: float, mode: ObservationMode) -> float:
    return recorded / plain


OBSERVED = ObservedSuite(
    "recorder",
    "cost of recording a training step, and whether its numbers stay the same",
    ObservationMode("not recorded", not_recorded),
    (
        mode("L0", "statistics", "L0, statistics", 1.3),
        mode("L0", "md5", "L0, hash", 1.5),
        mode("mix", "statistics", "mix, statistics"),
    ),
    (
        ObservedShape("124m-t256x2", 12, 12, 768, 256, 2),
        ObservedShape("124m-t256x1", 12, 12, 768, 256, 1),
    ),
    cost=ratio,
    plain_cost="1",
    head=("recorded", "CPU seconds", "CPU ratio", "wall ratio"),
)
SUITE = OBSERVED.suite()
