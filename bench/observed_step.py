"""Time a training step with and without something that observes it, in turns, and compare the numbers of both.

One process on one thread. Used by the suites `recorder` and `monitor`.
"""

from __future__ import annotations

import copy
import functools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.case_step import kernels, make_stepper, model_config, random_batch
from bench.cases import BASELINE, Sizes, find_shapes
from bench.runner import LIMIT_SECONDS, BenchWorker
from bench.suite import INTERVAL, Suite, SuiteSession, format_spread, format_table, spread
from gpt2.training_step import Stepper, StepResult
from runtime import attention_kernels
from runtime.settings import ANY_TARGET
from study.executors.child_process import KEEP_HEAP

ITERATIONS = 10**9  # of the schedule: a constant rate
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class ObservationMode:
    """One way to observe the step of B."""

    name: str
    # (stepper, batch, empty folder) -> the step with its observer, which is timed
    prepare: Callable[[Stepper, torch.Tensor, Path], Callable[[], StepResult]]
    goal: float | None = None  # largest ratio
    every: int = 1  # steps among which the cost is divided


@dataclass(frozen=True)
class ObservedShape(Sizes):
    """A model, and the sequences of the observed step."""

    sequences: int


SHAPES = (
    ObservedShape("124m-t256x2", 12, 12, 768, 256, 2),
    ObservedShape("124m-t256x1", 12, 12, 768, 256, 1),
)
Modes = tuple[ObservationMode, ...]  # the first one does not observe


def observed_suite(name: str, purpose: str, modes: Modes) -> Suite:
    return Suite(name, purpose, functools.partial(measure_modes, modes), rounds=6)


def measure_modes(modes: Modes, session: SuiteSession) -> tuple[Mapping[str, Any], list[str]]:
    """Measure the chosen shapes, each in a new worker with the environment of a training process."""
    results: list[dict[str, Any]] = []
    for shape in find_shapes(SHAPES, session.shape):
        with BenchWorker(f"{session.suite}, {shape.name}", KEEP_HEAP) as worker:
            limit = LIMIT_SECONDS * max(1, session.rounds)
            results.append(worker.call(time_modes, shape, modes, session.rounds, limit_seconds=limit))
        session.save({"shapes": results})
    return {"shapes": results}, [table(result, modes) for result in results]


def time_modes(shape: ObservedShape, modes: Modes, rounds: int) -> dict[str, Any]:
    """Time every mode once a round, after a warm-up and the comparison of numbers. Call in a worker."""
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
    torch.set_num_threads(1)
    stepper = make_stepper(shape, BASELINE, shape.sequences, resolved)
    ids_ET = random_batch(shape, shape.sequences, resolved.device)

    def run(mode: ObservationMode) -> tuple[StepResult, dict[str, Any]]:
        """Return the result of one step, and its seconds with writing its files."""
        with tempfile.TemporaryDirectory() as folder, kernels(BASELINE, resolved):
            step = mode.prepare(stepper, ids_ET, Path(folder))
            wall, cpu = time.perf_counter(), time.process_time()
            result = step()
            seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            return result, {"case": mode.name, **seconds}

    for _ in range(WARM_UP_STEPS):
        run(modes[0])
    differing = differing_modes(stepper, modes, lambda mode: run(mode)[0])
    samples = [run(mode)[1] for _ in range(rounds) for mode in modes]
    return {"shape": shape.name, "samples": samples, "differing": differing}


def differing_modes(
    stepper: Stepper, modes: Modes, run: Callable[[ObservationMode], StepResult]
) -> list[str]:
    """Return the modes whose step has another loss, gradient norm or weight than that of the first one."""
    before = copy.deepcopy(stepper.state())
    expected = run(modes[0])
    weights = copy.deepcopy(stepper.model.state_dict())
    found = []
    for mode in modes[1:]:
        stepper.load_state(copy.deepcopy(before))  # the optimizer takes its tensors
        result, now = run(mode), stepper.model.state_dict()
        if result != expected or not all(torch.equal(weights[name], now[name]) for name in weights):
            found.append(mode.name)
    return found


def ratios(
    samples: Sequence[Mapping[str, Any]], mode: ObservationMode, plain: str, clock: str
) -> list[float]:
    """Return the mean time of a mode's steps over the time of the plain one, in each round."""
    observed, alone = ([one[clock] for one in samples if one["case"] == name] for name in (mode.name, plain))
    return [1 + (one / other - 1) / mode.every for one, other in zip(observed, alone, strict=True)]


def table(result: Mapping[str, Any], modes: Modes) -> str:
    """List the seconds of each mode, its ratio on both clocks, and whether the numbers stay the same."""
    samples, plain = result["samples"], modes[0].name
    rows = []
    for mode in modes:
        cpu, wall = (format_spread(spread(ratios(samples, mode, plain, clock))) for clock in ("cpu", "wall"))
        rows.append(
            {
                "step": mode.name,
                "CPU seconds": format_spread(spread([s["cpu"] for s in samples if s["case"] == mode.name])),
                "CPU ratio": "1" if mode is modes[0] else cpu,
                "wall ratio": "1" if mode is modes[0] else wall,
                "goal": "-" if mode.goal is None else f"{mode.goal:g}",
                "loss, gradient norm, weights": "differ" if mode.name in result["differing"] else "equal",
            }
        )
    columns = {head: lambda row, head=head: row[head] for head in rows[0]}
    title = f"one optimizer step of {result['shape']}, one thread"
    return format_table(title, columns, rows, (f"median and {INTERVAL}",))
