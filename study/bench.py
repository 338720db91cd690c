"""`make bench`: speed and memory beside what a user would take instead, as ratios measured in one run.

Every case is measured in a process of its own, so that memory peaks stay apart; the cases take turns (A B C A B C),
so that a drift of the machine falls on all alike. A ratio is taken within a round, and its median over the rounds is
what is told.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from gpt2.config import VOCABULARY
from gpt2.errors import UserError
from study.child import KEEP_HEAP, how_it_ended

PLAIN, BASELINE = "plain", "B"


HELD_ROUNDS = 3  # of held processes, for one of new ones
FEW = 6  # rounds from which on a median has a 95 % interval within their range
INTERVAL = f"its 95 % interval; below {FEW} rounds the range"


class BenchError(UserError, RuntimeError):
    """A case could not be measured."""


@dataclass(frozen=True)
class Shape:
    """layers, heads, width and block_size of the model; what of it is measured: (case, micro-batch)."""

    name: str
    layers: int
    heads: int
    width: int
    block_size: int
    cases: tuple[tuple[str, int], ...]


VARIANTS = ("B", "RAALL", "RALEARN", "RALEARN:score", "RALEARN:hard", "RALEARN:hard:8")
SHAPES = {
    "cpu": (
        Shape("124m-t256", 12, 12, 768, 256, ((PLAIN, 2), *((name, 2) for name in VARIANTS))),
        Shape("6x384-t256", 6, 6, 384, 256, ((PLAIN, 12), *((name, 12) for name in VARIANTS))),
    ),
    "cuda": (
        Shape(
            "124m-t1024", 12, 12, 768, 1024,
            ((PLAIN, 12), (PLAIN, 32), ("B", 12), *((name, 32) for name in VARIANTS), ("B", 64)),
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One case in one round. step_seconds: median of its timed steps; flops: a token by the project's formula."""

    case: str
    micro: int
    round: int
    step_seconds: float
    tokens_per_second: float
    peak_bytes: int
    flops_per_token: float
    nanogpt_flops_per_token: float


Measure = Callable[[Shape, str, int, float], dict[str, Any]]


class Running:
    """A case in a process of its own, warmed up: `steps(seconds)` times steps for so long, at least one.

    Raises BenchError with the process's last words where it fails. A context manager that ends the process.
    """

    def __init__(self, shape: Shape, case: str, micro: int) -> None:
        self.name = f"{shape.name}, {case} at micro-batch {micro}"
        asked = json.dumps({"shape": asdict(shape) | {"cases": []}, "case": case, "micro": micro})
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scripts.bench", "--case", asked],
            env=dict(os.environ) if case == PLAIN else {"GLIBC_TUNABLES": KEEP_HEAP} | os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )

    def steps(self, seconds: float) -> dict[str, Any]:
        """What scripts.bench measured: the fields of Sample beside case, micro and round."""
        assert self.process.stdin
        assert self.process.stdout
        with contextlib.suppress(OSError):  # it may be gone
            self.process.stdin.write(f"{seconds}\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
                if isinstance(answer, dict):
                    return answer
        self.close()
        self._said.seek(0)
        last = (self._said.read().strip().splitlines() or ["no message"])[-1]
        status = self.process.returncode
        raise BenchError(f"{self.name}: {how_it_ended(status) if status < 0 else last}")

    def close(self) -> None:
        """It ends when it is asked for nothing more."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def in_a_process(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
    """Measure a case in a process that is new and gone afterwards, so that a card belongs to one at a time."""
    with Running(shape, case, micro) as running:
        return running.steps(seconds)


class Held:
    """Measure as in_a_process, but keep every process for its next turn: a turn can then be a single step.

    The shorter the turns, the closer in time are the steps that a ratio compares, and the less of a machine's drift
    falls between them. For our own cases only: the plain step gives its memory back and takes fresh pages all the
    time, which cost it a third of its speed on a virtual machine while other processes held theirs.
    All cases are in memory at once. A context manager that ends the processes.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[Shape, str, int], Running] = {}

    def __call__(self, shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        key = (shape, case, micro)
        if key not in self._running:
            self._running[key] = Running(shape, case, micro)
        return self._running[key].steps(seconds)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *exc: object) -> None:
        for running in self._running.values():
            running.close()
        self._running.clear()


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
    but the plain step in held processes, a step a turn and HELD_ROUNDS times the rounds, if they all fit.

    free: bytes of memory that nobody holds, None where that is not known.
    """
    if not on_cpu:
        return [Stage(NEW, shape, rounds, seconds, turns(on_cpu=False))]
    first = replace(shape, cases=tuple(case for case in shape.cases if case[0] in (PLAIN, BASELINE)))
    second = replace(shape, cases=tuple(case for case in shape.cases if case[0] != PLAIN))
    alone = Stage(NEW, first, rounds, seconds, turns(on_cpu=False))
    if free is not None and free < len(second.cases) * held_bytes(shape):
        return [alone, replace(alone, shape=second)]
    return [alone, Stage(HELD, second, HELD_ROUNDS * rounds, 0.0, turns(on_cpu=True))]


def held_bytes(shape: Shape) -> int:
    """Roughly what a process of the shape holds: weights, gradients and moments, half as much again, and torch."""
    parameters = 12 * shape.layers * shape.width**2 + (VOCABULARY + shape.block_size) * shape.width
    return 24 * parameters + 2**29


def run(
    shape: Shape, rounds: int, seconds: float, tell: Callable[[str], None], measure: Measure = in_a_process
) -> list[Sample]:
    """Every case of the shape once a round. A case that does not run (out of memory) is told of and left out."""
    samples, left_out = [], set()
    for number in range(rounds):
        for case, micro in shape.cases:
            if (case, micro) in left_out:
                continue
            try:
                seen = measure(shape, case, micro, seconds)
            except BenchError as error:
                left_out.add((case, micro))
                tell(f"left out: {error}")
                continue
            sample = Sample(case=case, micro=micro, round=number, **seen)
            samples.append(sample)
            speed = f"{sample.tokens_per_second:,.0f} tok/s"
            tell(f"round {number + 1}/{rounds}  {shape.name}  {case} micro {micro}: {speed}")
    return samples


def ratios(samples: list[Sample], case: tuple[str, int], to: tuple[str, int]) -> list[float]:
    """Speed of `case` over that of `to`, round by round."""
    speed = {(s.case, s.micro, s.round): s.tokens_per_second for s in samples}
    rounds = sorted({s.round for s in samples})
    pairs = [(speed.get((*case, r)), speed.get((*to, r))) for r in rounds]
    return [own / other for own, other in pairs if own and other]


def table(shape: Shape, samples: list[Sample], peak_flops: float | None) -> list[dict[str, Any]]:
    """A row a case: medians, and ratios to the plain step of the default micro-batch and to our baseline at its own."""
    plain = next(((case, micro) for case, micro in shape.cases if case == PLAIN), None)
    rows = []
    for case, micro in shape.cases:
        own = [s for s in samples if (s.case, s.micro) == (case, micro)]
        if not own:
            continue
        speed = median(s.tokens_per_second for s in own)
        same_micro = (PLAIN, micro)
        rows.append(
            {
                "case": case,
                "micro": micro,
                "tokens_per_second": speed,
                "mfu": speed * own[0].flops_per_token / peak_flops if peak_flops else None,
                "mfu_nanogpt": speed * own[0].nanogpt_flops_per_token / peak_flops if peak_flops else None,
                "peak_bytes": median(s.peak_bytes for s in own),
                "to_plain": spread(ratios(samples, (case, micro), plain))
                if plain and case != PLAIN
                else None,
                "to_plain_same_micro": spread(ratios(samples, (case, micro), same_micro))
                if case != PLAIN
                else None,
                "to_baseline": spread(ratios(samples, (case, micro), (BASELINE, micro)))
                if case not in (PLAIN, BASELINE)
                else None,
                "memory_to_plain_same_micro": memory_ratio(samples, (case, micro), same_micro),
            }
        )
    return rows


def spread(values: list[float]) -> dict[str, float] | None:
    """Median, least and most; low and high: the interval of the median, from FEW rounds on, before that least and most.

    The interval is that of the order statistics (the sign test turned round) at 95 % or a little more, for rounds that
    do not depend on each other.
    """
    if not values:
        return None
    ordered, n = sorted(values), len(values)
    rank, below = 0, 0.0
    while rank < n // 2 and (below := below + math.comb(n, rank) / 2**n) <= 0.025:
        rank += 1
    outside = max(rank - 1, 0)  # of the ordered values on either side
    return {
        "median": median(values),
        "low": ordered[outside],
        "high": ordered[n - 1 - outside],
        "least": ordered[0],
        "most": ordered[-1],
    }


def memory_ratio(samples: list[Sample], case: tuple[str, int], to: tuple[str, int]) -> float | None:
    own, other = ([s.peak_bytes for s in samples if (s.case, s.micro) == key] for key in (case, to))
    return median(own) / median(other) if own and other and case != to else None


def text(shape: Shape, rows: list[dict[str, Any]]) -> str:
    """The rows for a reader."""

    def ratio(value: dict[str, float] | None) -> str:
        return f"{value['median']:.2f} [{value['low']:.2f}, {value['high']:.2f}]" if value else "-"

    head = (
        "case",
        "micro",
        "tokens/s",
        "MFU",
        "peak GiB",
        "to plain",
        "at its micro",
        "to B",
        "memory to plain",
    )
    body = [
        (
            row["case"],
            str(row["micro"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['mfu']:.3f} ({row['mfu_nanogpt']:.3f})" if row["mfu"] else "-",
            f"{row['peak_bytes'] / 2**30:.2f}",
            ratio(row["to_plain"]),
            ratio(row["to_plain_same_micro"]),
            ratio(row["to_baseline"]),
            f"{row['memory_to_plain_same_micro']:.2f}" if row["memory_to_plain_same_micro"] else "-",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
    cells = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in [head, *body]]
    lines = ["  ".join(line).rstrip() for line in cells]
    return f"{shape.name}: {shape.layers} layers, width {shape.width}, T = {shape.block_size}\n" + "\n".join(
        lines
    )
