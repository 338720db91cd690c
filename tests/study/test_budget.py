"""A time limit, from the planner's timing to the end of the runs, on a simulated machine.

Plan and runs are the real ones; steps, evaluation and saving take the seconds that a test sets, and nothing else takes
any time.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpt2 import trainer, validation
from gpt2.clocks import Clocks, ClockTimer
from gpt2.training_step import Stepper, StepResult
from ra.variants import variant
from runtime import checkpoint, run_record
from runtime.batch_plan import WARM_UP_STEPS, BatchPlan
from runtime.resolved_target import resolve
from runtime.settings import AlternationSettings, Config
from runtime.signals import Stop
from study import planner
from study.plan_file import Plan
from study.step_timing import ROUNDS, Timing, measure_steps
from study.study_settings import StudySettings
from tests import small_runs

LIMIT = 60  # seconds
NAMES = ("B", "RAALL", "RALEARN")
ALTERNATION = AlternationSettings("output", 0.5, 100.0)
STEP = {"B": 0.25, "RAALL": 0.25, "RALEARN": 0.4}  # seconds
WARMING = 25.0  # of each of a process's first steps: compiling
Noise = Callable[[np.random.Generator, float], float]  # generator, seconds now -> a step's times the mean


class Machine:
    """Its clock, in seconds; `patch` makes the code under test live by it."""

    def __init__(self, seed: int, noise: Noise, evaluation: float = 0.0, saving: float = 0.0) -> None:
        self.seconds, self.evaluation, self.saving = 1000.0, evaluation, saving
        self.draw, self.noise = np.random.default_rng(seed), noise
        self.mean = math.nan
        self.steps: list[float] = []  # of this process

    def now(self) -> float:
        return self.seconds

    def process(self, mean: float) -> None:
        """A new one, whose steps take so long."""
        self.mean, self.steps = mean, []

    def step(self, ids_ET: Any, iteration: int, iterations: int, meter: Any = None) -> StepResult:
        taken = self.mean * self.noise(self.draw, self.seconds)
        self.seconds += taken + WARMING * (len(self.steps) < WARM_UP_STEPS)
        self.steps.append(taken)
        return StepResult(5.0, 1.0, 1e-3)

    def taking(self, seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **named: Any) -> Any:
            self.seconds += seconds
            return work(*arguments, **named)

        return slow

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        clock = SimpleNamespace(monotonic=self.now, perf_counter=self.now)
        patch.setattr(trainer, "time", clock)
        patch.setattr(validation, "perplexity", self.taking(self.evaluation, validation.perplexity))
        patch.setattr(checkpoint, "save", self.taking(self.saving, checkpoint.save))


def steady(draw: np.random.Generator, now: float) -> float:
    return 1.0


def jitter(draw: np.random.Generator, now: float) -> float:
    return float(draw.lognormal(-0.005, 0.1))  # a tenth of a step either way


def hiccups(draw: np.random.Generator, now: float) -> float:
    return 2.0 if draw.random() < 0.04 else 1.0


def waves(draw: np.random.Generator, now: float) -> float:
    return 1 + 0.2 * math.sin(now)  # every 6 s: one slower than the timing itself is not noise to it


def slow_waves(draw: np.random.Generator, now: float) -> float:
    return 1 + 0.15 * math.sin(now / 7)  # every 44 s: of a process's turn all steps are slow, or none


NOISES = (steady, jitter, hiccups, waves)


class Study:
    """Plan and run a very small model as scripts.train does, in this process and in the machine's time."""

    def __init__(
        self, folder: Path, texts: Path, names: tuple[str, ...] = NAMES, equal_time: bool = False
    ) -> None:
        self.folder, self.names, self.equal_time = folder, names, equal_time
        small = small_runs.configuration(texts, 0, seconds=LIMIT)
        grid = dataclasses.replace(small.evaluation, interval_tokens=20 * 64)
        self.config: Config = dataclasses.replace(small, evaluation=grid, checkpoint_seconds=600)
        self.resolved = resolve(self.config.target)

    def plan(self, machine: Machine, together: bool = False) -> Plan:
        def time_steps(names: Sequence[str], batch: BatchPlan, seconds: float) -> dict[str, Timing]:
            known: dict[int, str] = {}
            steps, timed_from = [0], []

            def step(stepper: Stepper, *arguments: Any) -> StepResult:
                steps[0] += 1
                machine.mean = STEP[known.setdefault(id(stepper), names[len(known) % len(names)])]
                return machine.step(*arguments)

            machine.process(math.nan)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Stepper, "step", step)
                timed = {name: variant(name, self.config.model, ALTERNATION) for name in names}
                found: Mapping[str, list[float]] = measure_steps(
                    self.config, self.resolved, timed, batch, seconds, Stop(), ClockTimer(machine.now),
                    after_warm_up=lambda: timed_from.append(steps[0]),
                )  # fmt: skip
            assert timed_from == [WARM_UP_STEPS * len(names)]
            return {name: Timing((tuple(values),), None) for name, values in found.items()}

        settings = StudySettings("s", self.names, 2, self.folder, self.equal_time)
        variants = {name: variant(name, self.config.model, ALTERNATION) for name in self.names}

        def count(existing: BatchPlan | None) -> planner.CountedArms:
            counted = planner.count_arms(self.config, settings, self.resolved, variants, existing)
            return dataclasses.replace(counted, fit_together=together)

        return planner.make_plan(self.config, settings, self.resolved, count, time_steps)

    def run(self, plan: Plan, name: str, machine: Machine, slower: float = 1.0) -> dict[str, Any]:
        """The finished record of a new run; its steps take `slower` times as long as when they were timed."""
        folder = self.folder / f"{name}-{len(list(self.folder.glob('*')))}"
        machine.process(slower * STEP[name])
        with pytest.MonkeyPatch.context() as patch:
            machine.patch(patch)
            planned = {"iterations": plan.variants[name].iterations, "batch": plan.batch}
            run = small_runs.start(folder, self.config, name, **planned)
            run.clocks = Clocks(now=machine.now)
            patch.setattr(run.stepper, "step", machine.step)
            assert run.train() == "finished"
        return run_record.load(folder).to_json()


@pytest.fixture
def study(tmp_path: Path, texts: Path) -> Study:
    return Study(tmp_path / "s", texts)


@pytest.mark.parametrize("noise", NOISES)
def test_all_variants_get_one_count_and_the_slowest_trains_for_the_time_limit(
    study: Study, noise: Noise
) -> None:
    plan = study.plan(Machine(1, noise))
    counts = {name: row.iterations for name, row in plan.variants.items()}
    assert len(set(counts.values())) == 1
    for seed, name in enumerate(NAMES):
        output = study.run(plan, name, Machine(10 + seed, noise, evaluation=300.0, saving=7.0))
        assert output["progress"]["iterations"] == counts[name]
        assert output["schedule"]["cut"] is False
        planned = LIMIT * STEP[name] / STEP["RALEARN"]
        assert output["clock"]["train"] == pytest.approx(planned, rel=0.1), name


@pytest.mark.parametrize("noise", NOISES)
def test_at_equal_time_every_variant_trains_for_the_time_limit(
    tmp_path: Path, texts: Path, noise: Noise
) -> None:
    study = Study(tmp_path / "s", texts, equal_time=True)
    plan = study.plan(Machine(1, noise))
    assert plan.variants["B"].iterations == plan.variants["RAALL"].iterations
    assert plan.variants["B"].iterations > plan.variants["RALEARN"].iterations
    for name in ("B", "RALEARN"):
        assert study.run(plan, name, Machine(10, noise))["clock"]["train"] == pytest.approx(LIMIT, rel=0.1)


@pytest.mark.parametrize("noise", [*NOISES, slow_waves])
@pytest.mark.parametrize("started", [0.0, 11.0, 22.0, 33.0])
def test_interleaved_steps_give_the_ratio_of_the_classes_under_any_load(
    study: Study, noise: Noise, started: float
) -> None:
    machine = Machine(1, noise)
    machine.seconds += started
    plan = study.plan(machine, together=True)
    ratio = plan.step_time_ratios["learned-output"]
    assert ratio.to == "standard"
    assert ratio.ratio == pytest.approx(STEP["RALEARN"] / STEP["B"], rel=0.08 if noise is hiccups else 0.04)
    assert (ratio.low or 0.0) <= ratio.ratio <= (ratio.high or 0.0)
    assert len({len(timed.samples) for timed in plan.classes.values()}) == 1


def test_the_time_of_evaluation_saving_and_compiling_changes_neither_count_nor_training_clock(
    study: Study,
) -> None:
    costs = ((0.0, 0.0), (2.0, 60.0), (5000.0, 0.5))  # of an evaluation, of a checkpoint
    plans = [study.plan(Machine(1, jitter, *cost)) for cost in costs]
    assert len({plan.variants["B"].iterations for plan in plans}) == 1
    runs = [study.run(plans[0], "B", Machine(2, jitter, *cost)) for cost in costs]
    times = [one["clock"]["train"] for one in runs]
    assert times == pytest.approx([times[0]] * 3, rel=1e-9)
    assert len({one["progress"]["iterations"] for one in runs}) == 1
    for one, (evaluation, saving) in zip(runs, costs, strict=True):
        evaluations = len(one["validation"]["history"])
        assert evaluations > 3
        assert one["clock"]["evaluate"] == pytest.approx(evaluations * evaluation)
        assert one["clock"]["checkpoint"] >= saving
        assert one["clock"]["compile"] > WARM_UP_STEPS * WARMING


@pytest.mark.parametrize("slower", [1.2, 3.0])
def test_a_machine_that_slows_down_after_timing_finishes_its_runs(study: Study, slower: float) -> None:
    plan = study.plan(Machine(1, jitter))
    output = study.run(plan, "RALEARN", Machine(2, waves, evaluation=300.0), slower)
    assert output["schedule"]["iterations"] == plan.variants["RALEARN"].iterations
    assert output["schedule"]["cut"] is False
    assert output["progress"]["iterations"] == plan.variants["RALEARN"].iterations
    assert output["clock"]["train"] == pytest.approx(slower * LIMIT, rel=0.1)


@pytest.mark.parametrize("names", [("B", "RAALL"), NAMES])
def test_every_cost_class_is_timed_equally_long_for_any_number_of_classes(
    tmp_path: Path, texts: Path, names: tuple[str, ...]
) -> None:
    study = Study(tmp_path / "s", texts, names)
    plan = study.plan(Machine(1, steady))
    assert len(plan.classes) == len(names) - 1  # B and RAALL are one
    for timed in plan.classes.values():
        beyond = sum(timed.samples) - planner.TIMING_LEAST
        assert -1e-6 < beyond < ROUNDS * timed.seconds_per_iteration + 1e-6
