"""Steps on an accelerator are timed by events of its queue: the planner waits for the device once, at the end."""

from pathlib import Path
from typing import Any

import pytest

from gpt2.clocks import EventTimer
from gpt2.training_step import Stepper
from ra.variants import variant
from runtime.batch_plan import WARM_UP_STEPS, plan_batch
from runtime.resolved_target import resolve
from runtime.settings import AlternationSettings
from runtime.signals import Stop
from study.step_timing import LEAST_TURNS, STEADY_TURNS, measure_steps
from tests import small_runs
from tests.device_queue import Queue

BEHIND = 30.0  # milliseconds of work in the queue


# the time of both is spent, or both means are steady, when the device has reached it, some steps after the host
@pytest.mark.parametrize(
    ("seconds", "until_steady", "expected"),
    [(0.0, False, LEAST_TURNS), (0.2, False, (400 + BEHIND) / 25), (60.0, True, STEADY_TURNS + BEHIND / 25)],
)
def test_steps_are_timed_until_the_time_is_spent_or_the_means_are_steady_without_waiting_for_the_device(
    tmp_path: Path,
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    until_steady: bool,
    expected: float,
) -> None:
    queue, steps = Queue(), []

    def mark(timer: EventTimer) -> Any:
        event = queue.event(timer.device, enable_timing=True)
        event.record()
        return event

    monkeypatch.setattr(EventTimer, "mark", mark)

    def step(stepper: Stepper, *arguments: Any) -> None:
        steps.append(len(queue.waits))
        queue.launch(10.0 if len(steps) % 2 else 15.0)
        queue.reached = max(queue.reached, queue.queued - BEHIND)

    monkeypatch.setattr(Stepper, "step", step)
    config = small_runs.configuration(texts, 4)
    batch = plan_batch(config.batch.effective, 1, 1, config.model.block_size)
    variants = {
        name: variant(name, config.model, AlternationSettings("output", 0.5, 100.0))
        for name in ("B", "RAALL")
    }
    found = measure_steps(
        config, resolve(config.target), variants, batch, seconds, Stop(), EventTimer("xpu"),
        until_steady=until_steady,
    )  # fmt: skip
    assert set(steps) == {0}
    turns = len(steps) // 2 - WARM_UP_STEPS
    assert {name: set(samples) for name, samples in found.items()} == {"B": {0.010}, "RAALL": {0.015}}
    assert [len(samples) for samples in found.values()] == [turns, turns]
    assert turns == (pytest.approx(expected, abs=1) if seconds else expected)
