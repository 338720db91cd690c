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
from bench.workers import BenchError, PersistentWorkers

Case = tuple[str, int]  # name, micro-batch
Measure = Callable[[Shape, str, int, float], dict[str, Any]]
OpenWorkers = Callable[[], AbstractContextManager[Measure]]


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


def new_workers() -> AbstractContextManager[Measure]:
    """Measure each turn in a new worker."""
    return contextlib.nullcontext(workers.measure_in_new_worker)


def workers_for(on_cpu: bool) -> OpenWorkers:
    """Choose the workers of our cases: persistent on a CPU, new for each turn on a GPU, which fits one at a time."""
    return PersistentWorkers if on_cpu else new_workers


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


def speed_ratios(samples: Sequence[Sample], case: Case, to: Case) -> list[float]:
    """Divide the speed of `case` by that of `to`, in every round that has both."""
    speed = {(s.case, s.micro, s.round): s.tokens_per_second for s in samples}
    rounds = sorted({s.round for s in samples})
    pairs = [(speed.get((*case, number)), speed.get((*to, number))) for number in rounds]
    return [one / other for one, other in pairs if one and other]


def memory_ratio(samples: Sequence[Sample], case: Case, to: Case) -> float | None:
    """Divide the median peak of `case` by that of `to`; None for the same case or a missing one."""
    one, other = ([s.peak_bytes for s in samples_of(samples, key)] for key in (case, to))
    return median(one) / median(other) if one and other and case != to else None
