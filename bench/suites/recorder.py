"""Measure what recording a training step costs: `make bench SUITE=recorder`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from bench.observed_step import ITERATIONS, ObservationMode, observed_suite
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


MODES = (
    ObservationMode("not recorded", not_recorded),
    ObservationMode("L0, statistics", functools.partial(recorded, "L0", "statistics"), 1.3),
    ObservationMode("L0, hash", functools.partial(recorded, "L0", "md5"), 1.5),
    ObservationMode("mix, statistics", functools.partial(recorded, "mix", "statistics")),
)


SUITE = observed_suite(
    "recorder", "cost of recording a training step, and whether its numbers stay the same", MODES
)
