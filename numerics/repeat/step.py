"""Repeat a step under several conditions and conclude why it is not reproducible.

found = repeat_step(step, state=(model, optimizer), times=8)
print(found.verdict)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from numerics.errors import NumericsError
from numerics.repeat.conditions import (
    BLOCKING,
    OBSERVED,
    ONE_THREAD,
    SYNCHRONISED,
    Condition,
    Conditions,
    Progress,
    available_threads,
)
from numerics.repeat.repeat_evidence import Evidence, Repetition, repetition_notes
from numerics.replayed_step import ReplayedStep

MOST_TIMES = 1000


def repeat_step(
    step: Callable[[], Any] | ReplayedStep,
    state: Mapping[str, Any] | Sequence[Any] = (),
    times: int = 8,
    threads: int | None = None,
    synchronise: Callable[[], object] | None = None,
    others: Callable[[Conditions], Mapping[str, Condition]] | None = None,
    progress: Progress | None = None,
) -> Repetition:
    """Repeat a step in this process and conclude.

    Args:
        step: runs one step; tensors that it returns are results. A Step has its state already.
        state: objects with state_dict, restored before each repetition: the model, the optimizer.
        times: repetitions of each condition, at least 2.
        threads: of the CPU, beside one thread. By default torch's number, or all CPUs where torch has one thread.
        synchronise: waits for all queued work; by default that of the accelerator.
        others: returns conditions of other processes.
        progress: receives condition, number of the repetition and their count.

    NumericsError where `times` or a state cannot be used. The state of before is restored at the end.
    """
    if isinstance(times, bool) or not isinstance(times, int) or not 2 <= times <= MOST_TIMES:
        raise NumericsError(f"times is {times!r}; fix: a number from 2 to {MOST_TIMES}")
    if not isinstance(step, ReplayedStep):
        step = ReplayedStep(step, state)
    many = threads or (torch.get_num_threads() if torch.get_num_threads() > 1 else available_threads())
    if synchronise is None and torch.accelerator.is_available():
        synchronise = torch.accelerator.synchronize
    conditions = Conditions(step, times, many, synchronise, progress)
    try:
        conditions.run()
        if others:
            conditions.found |= others(conditions)
        causes = Evidence(conditions.found, conditions.capture).collect()
    finally:
        step.restore()
    operations = len(conditions.found[OBSERVED].traces[0].events)
    notes = [*_not_run(conditions), *repetition_notes(conditions.found, causes)]
    return Repetition(conditions.found, causes, operations, notes)


def _not_run(conditions: Conditions) -> list[str]:
    """Return a sentence for conditions that this machine or this call leaves out."""
    found = []
    if conditions.many == 1:
        found.append(f"{ONE_THREAD}: not compared with several, since the step ran with one")
    if not conditions.synchronise:
        found.append(f"{SYNCHRONISED}, {BLOCKING}: not run, since a CPU queues nothing")
    return found
