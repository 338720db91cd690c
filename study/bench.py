"""`make bench`: speed and memory beside what a user would take instead, as ratios measured in one run.

Every case is measured in a process of its own, so that memory peaks stay apart; the cases take turns (A B C A B C),
so that a drift of the machine falls on all alike. A ratio is taken within a round, and its median and range over the
rounds are what is told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gpt2.errors import UserError
from study.child import KEEP_HEAP

PLAIN, BASELINE = "plain", "B"


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


def in_a_process(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
    """Measure a case in a new process; BenchError with its last words where it fails."""
    asked = json.dumps(
        {"shape": asdict(shape) | {"cases": []}, "case": case, "micro": micro, "seconds": seconds}
    )
    environment = dict(os.environ) if case == PLAIN else {"GLIBC_TUNABLES": KEEP_HEAP} | os.environ
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench", "--case", asked],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BenchError(f"{shape.name}, {case} at micro-batch {micro}: {last}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


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
    """Median, least and most."""
    return {"median": median(values), "least": min(values), "most": max(values)} if values else None


def memory_ratio(samples: list[Sample], case: tuple[str, int], to: tuple[str, int]) -> float | None:
    own, other = ([s.peak_bytes for s in samples if (s.case, s.micro) == key] for key in (case, to))
    return median(own) / median(other) if own and other and case != to else None


def text(shape: Shape, rows: list[dict[str, Any]]) -> str:
    """The rows for a reader."""

    def ratio(value: dict[str, float] | None) -> str:
        return f"{value['median']:.2f} [{value['least']:.2f}, {value['most']:.2f}]" if value else "-"

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
