"""What `make bench` makes of its samples: ratios within rounds, their intervals, and a table. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.cases import BASELINE, PLAIN, Shape

FEW = 6  # rounds from which on a median has a 95 % interval within their range
INTERVAL = f"its 95 % interval; below {FEW} rounds the range"


@dataclass(frozen=True)
class Sample:
    """One case in one round. step_seconds: of an optimizer step, the median of the samples that the case timed;

    flops_per_token: by the project's formula. peak_bytes: of the timed steps, not of what came before them.
    """

    case: str
    micro: int
    round: int
    step_seconds: float
    tokens_per_second: float
    peak_bytes: int
    flops_per_token: float
    nanogpt_flops_per_token: float


def ratios(samples: list[Sample], case: tuple[str, int], to: tuple[str, int]) -> list[float]:
    """Speed of `case` over that of `to`, round by round."""
    speed = {(s.case, s.micro, s.round): s.tokens_per_second for s in samples}
    rounds = sorted({s.round for s in samples})
    pairs = [(speed.get((*case, r)), speed.get((*to, r))) for r in rounds]
    return [own / other for own, other in pairs if own and other]


def table(shape: Shape, samples: list[Sample], peak_flops: float | None) -> list[dict[str, Any]]:
    """A row a case: medians, and ratios of speed and memory.

    to_plain: to the plain step at its default micro-batch (shape.plain_micro); to_plain_same_micro and to_baseline: to
    the plain step and to ours at the same micro-batch. None where the other was not measured.
    """
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
                "accumulation": shape.accumulation(micro),
                "tokens_per_second": speed,
                "mfu": speed * own[0].flops_per_token / peak_flops if peak_flops else None,
                "mfu_nanogpt": speed * own[0].nanogpt_flops_per_token / peak_flops if peak_flops else None,
                "peak_bytes": median(s.peak_bytes for s in own),
                "to_plain": spread(ratios(samples, (case, micro), (PLAIN, shape.plain_micro)))
                if case != PLAIN
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


def told(value: dict[str, float] | None, digits: int = 2) -> str:
    """A spread for a reader: 1.12 [1.05, 1.19]; "-" for none."""
    if value is None:
        return "-"
    return f"{value['median']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


def columns(cells: Sequence[Sequence[str]]) -> str:
    """Rows of cells under each other."""
    widths = [max(len(row[place]) for row in cells) for place in range(len(cells[0]))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    return "\n".join("  ".join(row).rstrip() for row in padded)


def memory_ratio(samples: list[Sample], case: tuple[str, int], to: tuple[str, int]) -> float | None:
    own, other = ([s.peak_bytes for s in samples if (s.case, s.micro) == key] for key in (case, to))
    return median(own) / median(other) if own and other and case != to else None


def text(shape: Shape, rows: list[dict[str, Any]]) -> str:
    """The rows for a reader; a batch is a micro-batch and how many of them an optimizer step has."""
    head = (
        "case",
        "batch",
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
            f"{row['micro']} x {row['accumulation']}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['mfu']:.3f} ({row['mfu_nanogpt']:.3f})" if row["mfu"] else "-",
            f"{row['peak_bytes'] / 2**30:.2f}",
            told(row["to_plain"]),
            told(row["to_plain_same_micro"]),
            told(row["to_baseline"]),
            f"{row['memory_to_plain_same_micro']:.2f}" if row["memory_to_plain_same_micro"] else "-",
        )
        for row in rows
    ]
    each = f"{shape.effective} sequences" if shape.effective else "a micro-batch"
    title = f"{shape.name}: {shape.layers} layers, width {shape.width}, T = {shape.block_size}"
    return "\n".join([f"{title}, {each} an optimizer step", columns([head, *body])])
