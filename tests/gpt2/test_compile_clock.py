"""A compiled step is not charged to the budget, at any position in a process."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpt2.trainer import WARM_UP_STEPS, TrainingRun
from runtime.settings import AlternationSettings, Config
from runtime.signals import Stop
from tests import small_runs
from tests.small_runs import StopAfter

ITERATIONS = 12
EVERY = 4  # steps between updates of the gate
FIRST = 5  # first iteration of the second process: 5 and 6 are its warm-up, 8 updates the gate


@pytest.fixture
def compiled_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of functions that torch.compile is called with. It returns them uncompiled."""
    names: list[str] = []

    def same(function: Callable[..., object]) -> Callable[..., object]:
        names.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", same)
    return names


def start(
    directory: Path, texts: Path, *, compile: bool, every: int, stop: Stop | None = None
) -> TrainingRun:
    config: Config = small_runs.configuration(texts, ITERATIONS)
    evaluation = dataclasses.replace(config.evaluation, interval_tokens=0)
    target = dataclasses.replace(config.target, compile=compile)
    config = dataclasses.replace(config, evaluation=evaluation, target=target)
    hard = AlternationSettings("hard", 0.6, 100.0, gate_every=every)
    return small_runs.start(directory, config, "RALEARN", stop, alternation=hard)


def clocks_of_steps(run: TrainingRun) -> list[str]:
    """Train the run to its end. Returns the clock of each step."""
    observed: list[str] = []
    step = run.stepper.step

    def watched(*arguments, **options):  # type: ignore[no-untyped-def]
        observed.append(run.clocks._running)
        return step(*arguments, **options)

    run.stepper.step = watched  # type: ignore[method-assign]
    run.train()
    return observed


@pytest.mark.parametrize(("compile", "every"), [(True, EVERY), (True, 1), (False, EVERY)])
def test_a_resumed_run_compiles_its_second_kind_of_step_on_the_compile_clock(
    tmp_path: Path, texts: Path, compiled_names: list[str], compile: bool, every: int
) -> None:
    begun = start(tmp_path, texts, compile=compile, every=every, stop=StopAfter(FIRST + 1))
    whole = clocks_of_steps(begun)
    assert whole == ["compile"] * WARM_UP_STEPS + ["train"] * (FIRST - WARM_UP_STEPS)
    run = start(tmp_path, texts, compile=compile, every=every)
    clocks = clocks_of_steps(run)
    late = [FIRST + number for number, clock in enumerate(clocks) if clock == "compile"]
    assert late == [FIRST, FIRST + 1] + ([8] if compile and every > 1 else [])
    assert len(clocks) == ITERATIONS - FIRST
    assert run.timed_steps == (FIRST - WARM_UP_STEPS) + len(clocks) - len(late)
    assert compiled_names == ["chunk_loss", "hidden"] * 2 * compile
