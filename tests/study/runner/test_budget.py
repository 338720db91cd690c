"""A time limit, from the planner's timing to the end of the runs, on a machine whose time is made up.

Plan and runs are the real ones; only what takes time (steps, evaluation, saving) takes as long as a test says, and
nothing else takes any.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpt2.artifacts import checkpoint, metrics_log, run_record
from gpt2.config.batch import BatchPlan
from gpt2.config.config import Config
from gpt2.eval import validation
from gpt2.hardware.resolve import resolve
from gpt2.system.signals import Stop
from gpt2.train import trainer
from gpt2.train.clocks import Clocks
from gpt2.train.run_plan import RunPlan
from gpt2.train.step import Stepper, StepResult
from gpt2.train.trainer import CUT_AT, WARM_UP_STEPS, Run
from ra.settings import AlternationSettings
from ra.variants import variant
from scripts import train as command
from study.runner import plan as planning
from study.runner.plan import Timing
from study.runner.settings import StudySettings
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
        patch.setattr(command, "time", clock)
        patch.setattr(validation, "perplexity", self.taking(self.evaluation, validation.perplexity))
        patch.setattr(checkpoint, "save", self.taking(self.saving, checkpoint.save))


def steady(draw: np.random.Generator, now: float) -> float:
    return 1.0


def jitter(draw: np.random.Generator, now: float) -> float:
    return float(draw.lognormal(-0.005, 0.1))  # a tenth of a step either way


def hiccups(draw: np.random.Generator, now: float) -> float:
    return 2.0 if draw.random() < 0.04 else 1.0


def waves(draw: np.random.Generator, now: float) -> float:
    return 1 + 0.2 * math.sin(now)  # every 6 s: one slower than the timing itself is no noise to it


def slow_waves(draw: np.random.Generator, now: float) -> float:
    return 1 + 0.15 * math.sin(now / 7)  # every 44 s: of a process's turn all steps are slow, or none


NOISES = (steady, jitter, hiccups, waves)


class Study:
    """Plans and makes runs of a very small model as scripts.train does, in this process and on the machine's time."""

    def __init__(self, folder: Path, texts: Path, names: tuple[str, ...] = NAMES) -> None:
        self.folder, self.names = folder, names
        small = small_runs.configuration(texts, 0, seconds=LIMIT)
        grid = dataclasses.replace(small.evaluation, interval_tokens=20 * 64)
        self.config: Config = dataclasses.replace(small, evaluation=grid, checkpoint_seconds=600)
        self.resolved = resolve(self.config.target)

    def plan(self, machine: Machine, together: bool = False) -> dict[str, Any]:
        def time_steps(name: str, batch: BatchPlan, seconds: float) -> Timing:
            told: list[dict[str, Any]] = []
            machine.process(STEP[name])
            with pytest.MonkeyPatch.context() as patch:
                machine.patch(patch)
                patch.setattr(Stepper, "step", lambda stepper, *arguments: machine.step(*arguments))
                patch.setattr(metrics_log, "print_event", told.append)
                chosen = variant(name, self.config.model, ALTERNATION)
                attentions = {name: chosen.attention}
                command._time_steps(self.config, self.resolved, attentions, batch, seconds, Stop())
            (timing,) = told
            return Timing(timing["seconds"][name], timing["peak_bytes"])

        def time_together(names: Sequence[str], batch: BatchPlan, seconds: float) -> dict[str, Timing]:
            told: list[dict[str, Any]] = []
            machine.process(math.nan)
            known: dict[int, str] = {}

            def step(stepper: Stepper, *arguments: Any) -> StepResult:
                machine.mean = STEP[known.setdefault(id(stepper), names[len(known) % len(names)])]
                return machine.step(*arguments)

            with pytest.MonkeyPatch.context() as patch:
                machine.patch(patch)
                patch.setattr(Stepper, "step", step)
                patch.setattr(metrics_log, "print_event", told.append)
                attentions = {name: variant(name, self.config.model, ALTERNATION).attention for name in names}
                command._time_steps(self.config, self.resolved, attentions, batch, seconds, Stop())
            (timing,) = told
            return {name: Timing(timing["seconds"][name], None) for name in names}

        settings = StudySettings("s", self.names, 2, self.folder, False)
        variants = {name: variant(name, self.config.model, ALTERNATION) for name in self.names}
        return planning.make_plan(
            self.config,
            settings,
            self.resolved,
            variants,
            time_steps,
            time_together=time_together if together else None,
        )

    def run(self, plan: dict[str, Any], name: str, machine: Machine, slower: float = 1.0) -> dict[str, Any]:
        """The finished record of a new run; its steps take `slower` times what they took when they were timed."""
        folder = self.folder / f"{name}-{len(list(self.folder.glob('*')))}"
        run_plan = RunPlan(
            folder, f"{name}0", name, 0, plan["variants"][name]["iterations"], BatchPlan(**plan["batch"])
        )
        machine.process(slower * STEP[name])
        with pytest.MonkeyPatch.context() as patch:
            machine.patch(patch)
            patch.setattr(metrics_log, "print_event", lambda line: None)
            attention = variant(name, self.config.model, ALTERNATION).attention
            run = Run(run_plan, self.config, self.resolved, attention, Stop())
            run.clocks = Clocks(now=machine.now)
            patch.setattr(run.stepper, "step", machine.step)
            assert run.train() == "finished"
        return run_record.load(folder)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_runs.write_texts(tmp_path_factory.mktemp("runs") / "texts")


@pytest.fixture
def study(tmp_path: Path, texts: Path) -> Study:
    return Study(tmp_path / "s", texts)


@pytest.mark.parametrize("noise", NOISES)
def test_a_run_trains_as_long_as_it_may_within_a_tenth_and_all_of_a_plan_take_as_many_steps(
    study: Study, noise: Noise
) -> None:
    plan = study.plan(Machine(1, noise))
    assert plan["variants"]["B"]["iterations"] > plan["variants"]["RALEARN"]["iterations"]
    seen: dict[str, list[dict[str, Any]]] = {}
    for seed, name in enumerate(("B", "B", "RAALL", "RALEARN")):
        seen.setdefault(name, []).append(
            study.run(plan, name, Machine(10 + seed, noise, evaluation=300.0, saving=7.0))
        )
    for name, runs in seen.items():
        for one in runs:
            assert one["clock"]["train"] == pytest.approx(LIMIT, rel=0.1), name
            assert one["progress"]["iterations"] == plan["variants"][name]["iterations"]
            assert one["schedule"]["cut"] is False
    assert seen["B"][0]["progress"] == seen["B"][1]["progress"] | {
        "train_seconds": seen["B"][0]["clock"]["train"]
    }
    assert seen["RAALL"][0]["progress"]["iterations"] == seen["B"][0]["progress"]["iterations"]


@pytest.mark.parametrize("noise", [*NOISES, slow_waves])
@pytest.mark.parametrize("started", [0.0, 11.0, 22.0, 33.0])
def test_steps_in_turn_give_the_ratio_of_the_classes_whatever_the_machine_does(
    study: Study, noise: Noise, started: float
) -> None:
    machine = Machine(1, noise)
    machine.seconds += started
    classes = study.plan(machine, together=True)["classes"]
    seconds = [classes[cost]["seconds_per_iteration"] for cost in ("standard", "learned-output")]
    assert seconds[1] / seconds[0] == pytest.approx(
        STEP["RALEARN"] / STEP["B"], rel=0.08 if noise is hiccups else 0.04
    )
    assert len({len(kind["samples"]) for kind in classes.values()}) == 1


def test_what_evaluation_saving_and_compiling_cost_changes_neither_the_count_nor_the_training_clock(
    study: Study,
) -> None:
    costs = ((0.0, 0.0), (2.0, 60.0), (5000.0, 0.5))  # of an evaluation, of a checkpoint
    plans = [study.plan(Machine(1, jitter, *cost)) for cost in costs]
    assert len({plan["variants"]["B"]["iterations"] for plan in plans}) == 1
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


@pytest.mark.parametrize("slower", [1.2, 1.5, 3.0])
def test_a_machine_that_has_slowed_down_since_it_was_timed_ends_its_runs_in_time_and_says_so(
    study: Study, slower: float
) -> None:
    plan = study.plan(Machine(1, jitter))
    seen = study.run(plan, "B", Machine(2, waves, evaluation=300.0), slower)
    assert seen["schedule"] == {"iterations": plan["variants"]["B"]["iterations"], "cut": True}
    assert LIMIT <= seen["clock"]["train"] <= CUT_AT * LIMIT
    assert any("the schedule was cut" in note for note in seen["notes"])


@pytest.mark.parametrize("names", [("B", "RAALL"), NAMES])
def test_every_cost_class_is_timed_for_as_long_however_many_there_are(
    tmp_path: Path, texts: Path, names: tuple[str, ...]
) -> None:
    study = Study(tmp_path / "s", texts, names)
    plan = study.plan(Machine(1, steady))
    assert len(plan["classes"]) == len(names) - 1  # B and RAALL are one
    for row in plan["classes"].values():
        beyond = sum(row["samples"]) - planning.TIMING_LEAST
        assert -1e-6 < beyond < planning.ROUNDS * row["seconds_per_iteration"] + 1e-6
