"""Measure cases in interleaved rounds (A B C A B C), so that drift of the machine affects all cases alike.

A ratio is taken within a round. The reported value is its median over the rounds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench import workers
from bench.cases import Shape
from bench.tables import spread
from bench.workers import BenchError, PersistentWorkers

Case = tuple[str, int]  # name, micro-batch
Measure = Callable[[Shape, str, int, float], dict[str, Any]]


@dataclass(frozen=True)
class Sample:
    """One case in one round. step_seconds: median time of an optimizer step.

    flops_per_token: by this project's formula. peak_bytes: of the timed steps only.
    """

    case: str
    micro: int
    round: int
    step_seconds: float
    tokens_per_second: float
    peak_bytes: int
    flops_per_token: float
    nanogpt_flops_per_token: float


def open_workers(persistent: bool) -> AbstractContextManager[Measure]:
    """Return a measure that reuses the worker of a case in all rounds, or one that starts a worker for each turn."""
    return PersistentWorkers() if persistent else contextlib.nullcontext(workers.measure_in_new_worker)


def interleaved_rounds(
    shape: Shape,
    rounds: int,
    seconds: float,
    say: Callable[[str], None],
    measure: Measure,
    after_round: Callable[[list[Sample], list[str]], None] = lambda samples, skipped: None,
) -> list[Sample]:
    """Measure every case of the shape once a round. Report and skip a case that fails (out of memory).

    after_round: gets all samples so far and the reasons for skipped cases, to save them.
    """
    samples: list[Sample] = []
    skipped: dict[Case, str] = {}
    for number in range(rounds):
        for case, micro in shape.cases:
            if (case, micro) in skipped:
                continue
            try:
                found = measure(shape, case, micro, seconds)
            except BenchError as error:
                skipped[case, micro] = str(error)
                say(f"skipped: {error}")
                continue
            sample = Sample(case=case, micro=micro, round=number, **found)
            samples.append(sample)
            speed = f"{sample.tokens_per_second:,.0f} tok/s"
            say(f"round {number + 1}/{rounds}  {shape.name}  {case} micro {micro}: {speed}")
        after_round(samples, list(skipped.values()))
    return samples


def samples_of(samples: Sequence[Sample], case: Case) -> list[Sample]:
    return [sample for sample in samples if (sample.case, sample.micro) == case]


def speed_ratio(samples: Sequence[Sample], case: Case, to: Case) -> dict[str, float] | None:
    """Return the spread of the speed of `case` over that of `to`, in the rounds that have both. None for one name."""
    other = {sample.round: sample.tokens_per_second for sample in samples_of(samples, to)}
    pairs = [(s.tokens_per_second, other[s.round]) for s in samples_of(samples, case) if s.round in other]
    return spread([one / two for one, two in pairs]) if case[0] != to[0] else None


def memory_ratio(samples: Sequence[Sample], case: Case, to: Case) -> float | None:
    """Divide the median peak of `case` by that of `to`; None for the same case or a missing one."""
    one, other = ([s.peak_bytes for s in samples_of(samples, key)] for key in (case, to))
    return median(one) / median(other) if one and other and case != to else None
