"""A training step with and without something that observes it, in turns: what it costs, and whether it changes numbers.

One process on one thread. Used by the suites `recorder` and `monitor`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from bench.case_step import make_stepper, model_config, random_batch
from bench.cases import BASELINE, Sizes, find_shapes
from bench.runner import LIMIT_SECONDS
from bench.suite import SuiteSession
from bench.tables import INTERVAL, ResultTable, format_spread, spread
from bench.workers import BenchWorker
from gpt2.config.config import ANY_TARGET
from gpt2.hardware import attention_kernels
from gpt2.train.step import Stepper, StepResult
from study.executors.child_process import KEEP_HEAP

ITERATIONS = 10**9  # of the schedule: a constant rate
WARM_UP_STEPS = 2


class ObservationMode(Protocol):
    """One way to observe. goal: its largest cost."""

    @property
    def name(self) -> str: ...

    @property
    def goal(self) -> float | None: ...


ModeT = TypeVar("ModeT", bound=ObservationMode)


@dataclass(frozen=True)
class ObservedShape(Sizes):
    """A model, and the sequences of the observed step."""

    sequences: int


class ObservedStep(Generic[ModeT]):
    """The optimizer step of B. A subclass defines `run`."""

    def __init__(self, shape: ObservedShape) -> None:
        self.resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
        torch.set_num_threads(1)
        self.stepper: Stepper = make_stepper(shape, BASELINE, shape.sequences, self.resolved)
        self.ids_ET = random_batch(shape, shape.sequences, self.resolved.device)

    def run(self, mode: ModeT | None) -> tuple[StepResult, float, float]:
        """Return the result of one step, and its seconds of wall time and of CPU time. None: not observed."""
        raise TypeError(f"{type(self).__name__} defines no run")

    def differing(self, modes: Sequence[ModeT]) -> list[str]:
        """Return the modes whose step has another loss, gradient norm or weight than the step that is not observed."""
        before = copy.deepcopy(self.stepper.state())
        expected, _, _ = self.run(None)
        weights = copy.deepcopy(self.stepper.model.state_dict())
        found = []
        for mode in modes:
            self.stepper.load_state(copy.deepcopy(before))  # the optimizer takes its tensors
            result, _, _ = self.run(mode)
            now = self.stepper.model.state_dict()
            if result != expected or not all(torch.equal(weights[name], now[name]) for name in weights):
                found.append(mode.name)
        return found

    def time_modes(self, modes: Sequence[ModeT], rounds: int, plain: str) -> dict[str, Any]:
        """Time every mode once a round, after a warm-up and the comparison of numbers. plain: name of no mode."""
        for _ in range(WARM_UP_STEPS):
            self.run(None)
        differing = self.differing(modes)
        samples = []
        for _ in range(rounds):
            for mode in (None, *modes):
                _, wall, cpu = self.run(mode)
                samples.append({"case": mode.name if mode else plain, "wall": wall, "cpu": cpu})
        return {"samples": samples, "differing": differing}


def run_shapes(
    session: SuiteSession,
    name: str,
    shapes: Sequence[ObservedShape],
    measure: Callable[[Any, int], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Measure the chosen shapes, each in a new worker with the environment of a training process."""
    results: list[dict[str, Any]] = []
    for shape in find_shapes(shapes, session.shape):
        with BenchWorker(f"{name}, {shape.name}", KEEP_HEAP) as worker:
            limit = LIMIT_SECONDS * max(1, session.rounds)
            results.append(worker.call(measure, shape, session.rounds, limit_seconds=limit))
        session.save({"shapes": results})
    return results


def table_of(
    result: Mapping[str, Any],
    modes: Sequence[ModeT],
    plain: tuple[str, str],
    head: tuple[str, ...],
    costs: Callable[[Sequence[dict[str, Any]], ModeT, str], list[float]],
    title: str = "",
) -> ResultTable:
    """Return a row of each mode: its seconds, its cost on both clocks, and whether the numbers stay the same.

    plain: the name of the step that is not observed, and its cost. costs: of a mode on a clock in each round.
    """
    samples, differing = result["samples"], result["differing"]

    def seconds(name: str) -> str:
        return format_spread(spread([sample["cpu"] for sample in samples if sample["case"] == name]))

    cells = [(plain[0], seconds(plain[0]), plain[1], plain[1], "-", "-")]
    for mode in modes:
        cpu, wall = (format_spread(spread(costs(samples, mode, clock))) for clock in ("cpu", "wall"))
        goal = "-" if mode.goal is None else f"{mode.goal:g}"
        cells.append(
            (mode.name, seconds(mode.name), cpu, wall, goal, "differ" if mode.name in differing else "equal")
        )
    return ResultTable(
        f"one optimizer step of {result['shape']}, one thread{title}",
        (*head, "goal", "loss, gradient norm, weights"),
        tuple(cells),
        (f"median and {INTERVAL}",),
    )


def pairs(samples: Sequence[dict[str, Any]], name: str, plain: str, clock: str) -> list[tuple[float, float]]:
    """Return the seconds of a mode and of the step that is not observed, in each round."""
    of = {case: [one[clock] for one in samples if one["case"] == case] for case in (plain, name)}
    return list(zip(of[name], of[plain], strict=True))
