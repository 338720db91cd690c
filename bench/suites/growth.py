"""How cost grows with the length of the text and with the model: `make bench GROWTH=1`. Needs no torch.

Each case is timed in processes of its own, and those of a shape take turns, as in `study.bench`. On a CPU the peak
comes from another process than the time: the heap that training keeps its buffers in
(study.runner.child_process) makes the resident
peak wobble with what it keeps, so that peaks are taken under EXACT_HEAP, where the resident set is what is allocated.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import linear_regression, median
from typing import Any

from bench import runner as bench
from bench.runner import BASELINE, BenchError, Sample, Shape, ratios, spread
from bench.tables import columns, told
from bench.workers import last_words
from gpt2.memory.measure import EXACT_HEAP

VARIANTS = ("B", "RAALL", "RALEARN")
LENGTHS = (256, 512, 1024, 2048, 4096)
HEAD_SIZE = 64
KNEE = (
    "The loss works in chunks of rows: a micro-batch of fewer rows than one chunk makes a smaller one, which bends the "
    "line at short T."
)


@dataclass(frozen=True)
class Series:
    """Shapes that differ in one thing. along: "T" or "size"; what stays as it is stands in `fixed`."""

    along: str
    fixed: str
    shapes: tuple[Shape, ...]


def by_length(name: str, layers: int, width: int, micro: int) -> Series:
    cases = tuple((variant, micro) for variant in VARIANTS)
    shapes = tuple(Shape(f"{T}", layers, width // HEAD_SIZE, width, T, cases) for T in LENGTHS)
    return Series("T", f"{name}, micro-batch {micro}", shapes)


def by_size(sizes: Sequence[tuple[str, int, int]], block_size: int, micro: int) -> Series:
    """sizes: (name, layers, width)."""
    cases = tuple((variant, micro) for variant in VARIANTS)
    shapes = tuple(
        Shape(name, layers, width // HEAD_SIZE, width, block_size, cases) for name, layers, width in sizes
    )
    return Series("size", f"T = {block_size}, micro-batch {micro}", shapes)


SERIES = {
    "cpu": (
        by_length("4 layers, width 256", 4, 256, 1),
        by_size([("2x128", 2, 128), ("4x256", 4, 256), ("6x384", 6, 384), ("12x768", 12, 768)], 256, 2),
    ),
    "cuda": (
        by_length("124M", 12, 768, 4),
        by_size([("124M", 12, 768), ("350M", 24, 1024), ("774M", 36, 1280)], 1024, 8),
    ),
}


def peak_in_a_process(shape: Shape, case: str, micro: int) -> int:
    """Peak bytes of one optimizer step on a CPU, in a new process under EXACT_HEAP; BenchError where it fails."""
    asked = json.dumps({"shape": asdict(shape) | {"cases": []}, "case": case, "micro": micro})
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench_growth", "--peak", asked],
        env=os.environ | {"GLIBC_TUNABLES": EXACT_HEAP},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise BenchError(f"peak of {shape.name}, {case} at micro-batch {micro}: {last_words(done.stderr)}")
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])


def run(
    series: Series,
    rounds: int,
    seconds: float,
    tell: Callable[[str], None],
    turns: bench.Turns,
    peak: Callable[[Shape, str, int], int] | None = None,
    after: Callable[[dict[str, list[Sample]]], None] = lambda found: None,
) -> dict[str, list[Sample]]:
    """Samples by shape. peak: measures the memory apart from the time, once a case; without it the sample's stands.

    after: called with all samples so far, to be kept: at the end of each shape, and without `peak` of each round.
    """
    found: dict[str, list[Sample]] = {}
    for shape in series.shapes:

        def each_round(samples: list[Sample], left_out: list[str], name: str = shape.name) -> None:
            if not peak:
                after(found | {name: samples})

        with turns() as measure:
            samples = bench.run(shape, rounds, seconds, tell, measure, each_round)
        if peak:
            seen = {}
            for case, micro in dict.fromkeys((s.case, s.micro) for s in samples):
                try:
                    seen[case, micro] = peak(shape, case, micro)
                except BenchError as error:
                    tell(f"left out: {error}")
                    continue
                tell(f"peak of {series.along} {shape.name}  {case}: {seen[case, micro] / 2**20:,.0f} MiB")
            known = [s for s in samples if (s.case, s.micro) in seen]
            samples = [replace(s, peak_bytes=seen[s.case, s.micro]) for s in known]
        found[shape.name] = samples
        after(found)
    return found


def table(series: Series, found: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """A row a shape and case: medians over the rounds; time_to_baseline and memory_to_baseline are cost ratios."""
    rows = []
    for shape in series.shapes:
        samples = found.get(shape.name, [])
        for case, micro in shape.cases:
            own = [s for s in samples if (s.case, s.micro) == (case, micro)]
            if not own:
                continue
            base = (BASELINE, micro)
            rows.append(
                {
                    series.along: shape.block_size if series.along == "T" else shape.name,
                    "case": case,
                    "tokens_per_second": median(s.tokens_per_second for s in own),
                    "step_seconds": median(s.step_seconds for s in own),
                    "peak_bytes": median(s.peak_bytes for s in own),
                    # speed of the baseline over the case's own is the case's time over the baseline's
                    "time_to_baseline": spread(ratios(samples, base, (case, micro)))
                    if case != BASELINE
                    else None,
                    "memory_to_baseline": bench.memory_ratio(samples, (case, micro), base),
                }
            )
    return rows


@dataclass(frozen=True)
class Line:
    """The least-squares line of peak bytes over T. deviation: the largest distance from it as a share of the peak.

    last_doubling: log2 of the peak's growth from the last T but one to the last, over log2 of T's; at most 1 for a
    straight line with a positive start, 2 for a square law.
    """

    first: int  # the least T that it was fitted to
    start_bytes: float
    bytes_per_token: float
    deviation: float
    last_doubling: float


def line(points: Sequence[tuple[int, float]]) -> Line | None:
    """Through (T, peak bytes); None for fewer than three points, which any line would fit."""
    if len(points) < 3:
        return None
    lengths, peaks = zip(*sorted(points), strict=True)
    slope, start = linear_regression(lengths, peaks)
    deviation = max(abs(start + slope * T - peak) / peak for T, peak in zip(lengths, peaks, strict=True))
    doubling = math.log(peaks[-1] / peaks[-2]) / math.log(lengths[-1] / lengths[-2])
    return Line(lengths[0], start, slope, deviation, doubling)


def lines(rows: list[dict[str, Any]], knee: int) -> dict[str, list[dict[str, float]]]:
    """Each variant's lines over T: through all points, and through those from T = `knee` on.

    The loss takes its rows in chunks (gpt2.model.loss). knee: the least T at which a micro-batch fills one; before it a
    longer text also makes the chunk larger.
    """
    found = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        points = sorted((row["T"], row["peak_bytes"]) for row in rows if row["case"] == case)
        behind = [point for point in points if point[0] >= knee]
        sides = (line(points), line(behind) if behind != points else None)
        found[case] = [asdict(fitted) for fitted in sides if fitted]
    return {case: fitted for case, fitted in found.items() if fitted}


def text(series: Series, rows: list[dict[str, Any]], fits: dict[str, list[dict[str, float]]]) -> str:
    """Rows and fits for a reader."""
    head = (series.along, "case", "tokens/s", "step ms", "peak MiB", "time to B", "memory to B")
    body = [
        (
            str(row[series.along]),
            row["case"],
            f"{row['tokens_per_second']:,.0f}",
            f"{1000 * row['step_seconds']:,.1f}",
            f"{row['peak_bytes'] / 2**20:,.0f}",
            told(row["time_to_baseline"], 3),
            f"{row['memory_to_baseline']:.3f}" if row["memory_to_baseline"] else "-",
        )
        for row in rows
    ]
    said = [f"cost by {series.along} ({series.fixed})", columns([head, *body])]
    for case, fit in ((case, fit) for case, fitted in fits.items() for fit in fitted):
        start, each = fit["start_bytes"] / 2**20, fit["bytes_per_token"] / 2**10
        said.append(
            f"peak of {case} from T = {fit['first']} on: {start:,.0f} MiB + {each:,.1f} KiB for each of T; at most "
            f"{fit['deviation']:.1%} off that line; last doubling: T^{fit['last_doubling']:.2f}"
        )
    if any(len(fitted) > 1 for fitted in fits.values()):
        said.append(KNEE)
    return "\n".join(said)
