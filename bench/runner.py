"""`make bench`: speed and memory beside what a user would take instead, as ratios measured in one run.

Every case is measured in a process of its own, so that memory peaks stay apart; the cases take turns (A B C A B C),
so that a drift of the machine falls on all alike. A ratio is taken within a round, and its median over the rounds is
what is told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from bench.cases import BASELINE, PLAIN, SHAPES, VARIANTS, Shape, chosen
from bench.tables import FEW, INTERVAL, Sample, memory_ratio, ratios, spread, table, text
from bench.workers import BenchError, Held, Running, in_a_process
from gpt2.config.config import VOCABULARY

__all__ = [
    "BASELINE",
    "FEW",
    "INTERVAL",
    "PLAIN",
    "SHAPES",
    "VARIANTS",
    "BenchError",
    "Held",
    "Running",
    "Sample",
    "Shape",
    "chosen",
    "in_a_process",
    "memory_ratio",
    "ratios",
    "run",
    "spread",
    "stages",
    "table",
    "text",
    "turns",
]

HELD_ROUNDS = 3  # of held processes, for one of new ones
# Rounds, and seconds of timed steps a turn. On a GPU nearly all of a turn is a new process that loads torch and makes
# its kernels ready, once a case and round; three rounds are below FEW, so that what stands in brackets there is their
# range and is called that: no confidence is claimed that so few rounds do not give. ROUNDS=6 has an interval.
DEFAULTS = {"cpu": (6, 12.0), "cuda": (3, 6.0)}

Measure = Callable[[Shape, str, int, float], dict[str, Any]]
Turns = Callable[[], AbstractContextManager[Measure]]


def turns(on_cpu: bool) -> Turns:
    """How our own cases take turns: on a CPU their processes are held; a card belongs to one at a time."""
    return Held if on_cpu else (lambda: contextlib.nullcontext(in_a_process))


@dataclass(frozen=True)
class Stage:
    """Some cases of a shape, how often and how long they are measured in turn, and in which processes."""

    name: str
    shape: Shape
    rounds: int
    seconds: float
    turns: Turns


NEW, HELD = (
    "each turn in a new process",
    "processes held from turn to turn, so that intervals are of these processes",
)


def stages(shape: Shape, on_cpu: bool, rounds: int, seconds: float, free: int | None) -> list[Stage]:
    """On a GPU one, of all cases, each in new processes. On a CPU so only the plain step and the baseline; then all
    but the plain step in held processes, a step a turn and HELD_ROUNDS times the rounds, if they all fit. A stage
    without cases is none.

    free: bytes of memory that nobody holds, None where that is not known.
    """
    if not on_cpu:
        return [Stage(NEW, shape, rounds, seconds, turns(on_cpu=False))]
    first = replace(shape, cases=tuple(case for case in shape.cases if case[0] in (PLAIN, BASELINE)))
    second = replace(shape, cases=tuple(case for case in shape.cases if case[0] != PLAIN))
    alone = Stage(NEW, first, rounds, seconds, turns(on_cpu=False))
    together = Stage(HELD, second, HELD_ROUNDS * rounds, 0.0, turns(on_cpu=True))
    if free is not None and free < len(second.cases) * held_bytes(shape):
        together = replace(alone, shape=second)
    return [stage for stage in (alone, together) if stage.shape.cases]


def held_bytes(shape: Shape) -> int:
    """Roughly what a process of the shape holds: weights, gradients and moments, half as much again, and torch."""
    parameters = 12 * shape.layers * shape.width**2 + (VOCABULARY + shape.block_size) * shape.width
    return 24 * parameters + 2**29


def run(
    shape: Shape,
    rounds: int,
    seconds: float,
    tell: Callable[[str], None],
    measure: Measure = in_a_process,
    after: Callable[[list[Sample], list[str]], None] = lambda samples, reasons: None,
) -> list[Sample]:
    """Every case of the shape once a round. A case that does not run (out of memory) is told of and left out.

    after: called at the end of each round with all samples so far and why cases were left out, to be kept.
    """
    samples: list[Sample] = []
    left_out: dict[tuple[str, int], str] = {}
    for number in range(rounds):
        for case, micro in shape.cases:
            if (case, micro) in left_out:
                continue
            try:
                seen = measure(shape, case, micro, seconds)
            except BenchError as error:
                left_out[case, micro] = str(error)
                tell(f"left out: {error}")
                continue
            sample = Sample(case=case, micro=micro, round=number, **seen)
            samples.append(sample)
            speed = f"{sample.tokens_per_second:,.0f} tok/s"
            tell(f"round {number + 1}/{rounds}  {shape.name}  {case} micro {micro}: {speed}")
        after(samples, list(left_out.values()))
    return samples
