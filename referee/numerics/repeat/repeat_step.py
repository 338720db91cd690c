"""Repeat a step under several conditions and conclude why it is not reproducible.

found = repeat_step(step, state=(model, optimizer), times=8)
print(found.verdict)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from referee.errors import NumericsError
from referee.numerics.repeat.conditions import Conditions
from referee.numerics.repeat.repeat_evidence import Evidence, Repetition
from referee.numerics.replayed_step import ReplayedStep

MOST_TIMES = 1000


def repeat_step(
    step: Callable[[], Any] | ReplayedStep,
    state: Mapping[str, Any] | Sequence[Any] = (),
    times: int = 8,
    threads: int | None = None,
    synchronise: Callable[[], object] | None = None,
    others: Callable[[Conditions], None] = lambda conditions: None,
    progress: Callable[[str], object] = lambda name: None,
) -> Repetition:
    """Repeat a step in this process and conclude.

    Args:
        step: runs one step; tensors that it returns are results. A ReplayedStep has its state already.
        state: objects with state_dict, restored before each repetition: the model, the optimizer.
        times: repetitions of each condition, at least 2.
        threads: of the CPU, besides one thread. By default torch's number, or all CPUs where torch has one thread.
        synchronise: waits for all queued work; by default that of the accelerator.
        others: adds conditions of other processes.
        progress: receives the name of each condition.

    NumericsError where `times` or a state cannot be used. The state of before is restored at the end.
    """
    if isinstance(times, bool) or not isinstance(times, int) or not 2 <= times <= MOST_TIMES:
        raise NumericsError(f"times is {times!r}; fix: a number from 2 to {MOST_TIMES}")
    if not isinstance(step, ReplayedStep):
        step = ReplayedStep(step, state)
    many = torch.get_num_threads()
    many = threads or (many if many > 1 else os.cpu_count() or 1)
    if synchronise is None and torch.accelerator.is_available():
        synchronise = torch.accelerator.synchronize
    conditions = Conditions(step, times, many, synchronise, progress)
    try:
        conditions.run()
        others(conditions)
        return Repetition(conditions.found, Evidence(conditions.found, conditions.capture).collect())
    finally:
        step.restore()
