"""Measure how time and memory grow with sequence length and model size: `make bench SUITE=growth`.

On a CPU, peaks come from a separate worker: the heap of a training process keeps freed buffers, so that the resident
peak varies. Under EXACT_HEAP the resident set is the allocated memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from bench import workers
from bench.case_step import model_and_attention, optimizer_config
from bench.cases import BASELINE, Shape
from bench.runner import (
    Case,
    Measure,
    Sample,
    interleaved_rounds,
    memory_ratio,
    open_workers,
    samples_of,
    speed_ratio,
)
from bench.suite import Options, Session, Suite, SuiteResult
from bench.tables import INTERVAL, Columns, ResultTable, format_ratio, format_spread, mebibytes
from bench.workers import BenchError
from gpt2.hardware.cpu import cpu_threads
from gpt2.memory.measure import EXACT_HEAP
from gpt2.memory.workload import StepWorkload
from gpt2.system.errors import UserError
from gpt2.train.peak_memory import PeakMeter

VARIANTS = ("B", "RAALL", "RALEARN")
LENGTHS = (256, 512, 1024, 2048, 4096)
HEAD_SIZE = 64
PEAK_STEP = "bench.suites.growth:peak_step"
ON_A_CPU = (
    "Times: with the heap of a training process, which keeps freed buffers. Peaks: growth of the resident set over "
    "one\noptimizer step in another process, where each large buffer has separate pages."
)
ON_A_GPU = "Peaks: the allocator's peak during the timed steps, in the same process."


@dataclass(frozen=True)
class Series:
    """Shapes that differ in one thing. along: "T" or "size". fixed: the sizes that stay the same."""

    along: str
    fixed: str
    shapes: tuple[Shape, ...]


def shape_of(name: str, layers: int, width: int, block_size: int, micro: int) -> Shape:
    cases = tuple((variant, micro) for variant in VARIANTS)
    return Shape(name, layers, width // HEAD_SIZE, width, block_size, cases)


def by_length(name: str, layers: int, width: int, micro: int) -> Series:
    shapes = tuple(shape_of(f"{T}", layers, width, T, micro) for T in LENGTHS)
    return Series("T", f"{name}, micro-batch {micro}", shapes)


def by_size(sizes: Sequence[tuple[str, int, int]], block_size: int, micro: int) -> Series:
    """sizes: (name, layers, width)."""
    shapes = tuple(shape_of(name, layers, width, block_size, micro) for name, layers, width in sizes)
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
PARTS = ("T", "size")


def measure_peak(shape: Shape, case: str, micro: int) -> int:
    """Return the peak bytes of one optimizer step on a CPU, from a new worker under EXACT_HEAP."""
    arguments = {"shape": asdict(shape), "case": case, "micro": micro}
    label = f"peak of {workers.case_label(shape, case, micro)}"
    limit = workers.FIRST_ANSWER_SECONDS
    return int(workers.call_in_worker(label, PEAK_STEP, arguments, EXACT_HEAP, limit)["peak_bytes"])


def peak_step(shape: dict[str, Any], case: str, micro: int) -> dict[str, int]:
    """Measure one optimizer step on a CPU, in a worker: growth of the resident set, weights included.

    The evaluation is left out: its batch has the same number of tokens at every T.
    """
    torch.set_num_threads(cpu_threads(0))

    def step(sizes: Shape) -> PeakMeter:
        model, attention = model_and_attention(sizes, case)
        work = StepWorkload(model, optimizer_config(), attention, micro, 1, "cpu", "float32")
        meter = PeakMeter("cpu")
        stepper = work.prepare("cpu")  # with the optimizer's state, so that the step is a typical one
        stepper.step(torch.zeros((micro, sizes.block_size + 1), dtype=torch.int64), 1, 2, meter)
        return meter

    step(Shape("warm-up", 1, 1, 8, 2))  # torch loads libraries at first use; they are not part of the step
    measured = step(Shape(**shape))
    return {"peak_bytes": max(measured.by_phase.values(), default=measured.peaks()["allocated"])}


Samples = dict[str, list[Sample]]  # by shape


def measure_series(
    series: Series,
    options: Options,
    say: Callable[[str], None],
    workers: Callable[[], AbstractContextManager[Measure]],
    peak: Callable[[Shape, str, int], int] | None = None,
    save: Callable[[Samples], None] = lambda found: None,
) -> Samples:
    """Measure all shapes and return their samples by shape.

    peak: measures memory separately, once a case; without it the timed process gives it. save: gets all samples so far
    after each shape, and without `peak` after each round.
    """
    found: Samples = {}
    for shape in series.shapes:

        def after_round(samples: list[Sample], skipped: list[str], name: str = shape.name) -> None:
            if not peak:
                save(found | {name: samples})

        with workers() as measure:
            samples = interleaved_rounds(shape, options.rounds, options.seconds, say, measure, after_round)
        found[shape.name] = with_peaks(shape, samples, peak, say) if peak else samples
        save(found)
    return found


def with_peaks(
    shape: Shape, samples: list[Sample], peak: Callable[[Shape, str, int], int], say: Callable[[str], None]
) -> list[Sample]:
    """Replace the peaks of the samples by separate measurements. Leave out a case that has none."""
    peaks: dict[Case, int] = {}
    for case, micro in dict.fromkeys((sample.case, sample.micro) for sample in samples):
        try:
            peaks[case, micro] = peak(shape, case, micro)
            say(f"peak of {shape.name}  {case}: {mebibytes(peaks[case, micro])} MiB")
        except BenchError as error:
            say(f"skipped: {error}")
    known = [sample for sample in samples if (sample.case, sample.micro) in peaks]
    return [replace(sample, peak_bytes=peaks[sample.case, sample.micro]) for sample in known]


def rows_of(series: Series, found: Samples) -> list[dict[str, Any]]:
    """Return one row a shape and case: medians over the rounds, and time and memory as multiples of B's."""
    rows = []
    for shape in series.shapes:
        samples = found.get(shape.name, [])
        for case, micro in shape.cases:
            measured = samples_of(samples, (case, micro))
            if not measured:
                continue
            base = (BASELINE, micro)
            rows.append(
                {
                    series.along: shape.block_size if series.along == "T" else shape.name,
                    "case": case,
                    "tokens_per_second": median(sample.tokens_per_second for sample in measured),
                    "step_seconds": median(sample.step_seconds for sample in measured),
                    "peak_bytes": median(sample.peak_bytes for sample in measured),
                    # the speed of B over that of the case is the time of the case over that of B
                    "time_to_baseline": speed_ratio(samples, base, (case, micro)),
                    "memory_to_baseline": memory_ratio(samples, (case, micro), base),
                }
            )
    return rows


def peak_growth(points: Sequence[tuple[int, float]]) -> dict[str, float] | None:
    """Compare the peaks at the last two of (T, peak bytes): bytes for each of T, and p where the peak grows as T^p.

    p is at most 1 for a straight line with a positive start, and 2 for a square law. None for a single point.
    """
    if len(points) < 2:
        return None
    (T, low), (longest, high) = sorted(points)[-2:]
    power = math.log(high / low) / math.log(longest / T)
    return {"from": T, "to": longest, "bytes_per_token": (high - low) / (longest - T), "power": power}


def growth_by_case(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return each variant's growth of the peak with T."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        points.setdefault(row["case"], []).append((row["T"], row["peak_bytes"]))
    return {case: found for case, own in points.items() if (found := peak_growth(own))}


def table(series: Series, rows: list[dict[str, Any]], growth: dict[str, dict[str, float]]) -> ResultTable:
    columns: Columns = {
        series.along: lambda row: str(row[series.along]),
        "case": lambda row: row["case"],
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "step ms": lambda row: f"{1000 * row['step_seconds']:,.1f}",
        "peak MiB": lambda row: mebibytes(row["peak_bytes"]),
        "time to B": lambda row: format_spread(row["time_to_baseline"], ".3f"),
        "memory to B": lambda row: format_ratio(row["memory_to_baseline"], ".3f"),
    }
    notes = [
        f"peak of {case} from T = {found['from']} to {found['to']}: {found['bytes_per_token'] / 2**10:,.1f} KiB for "
        f"each of T; it grows as T^{found['power']:.2f}"
        for case, found in growth.items()
    ]
    return ResultTable.of(f"cost by {series.along} ({series.fixed})", columns, rows, notes)


def run(options: Options, session: Session) -> SuiteResult:
    """Measure both series, or the one that SHAPE names. Save after every round, on a CPU after every shape."""
    if options.shape not in ("", *PARTS):
        raise UserError(f"unknown part SHAPE={options.shape}; parts: {', '.join(PARTS)}")
    note = ON_A_CPU if session.on_cpu else ON_A_GPU
    peak = measure_peak if session.on_cpu else None
    data: dict[str, Any] = {"memory": note}
    tables = []
    for series in SERIES[session.resolved.device_type]:
        if options.shape not in ("", series.along):
            continue

        def save(found: Samples, series: Series = series) -> None:
            data[series.along] = series_data(series, found)
            session.save(data)

        open_all = partial(open_workers, session.on_cpu)
        measure_series(series, options, session.say, open_all, peak, save)
        if data[series.along]["rows"]:
            tables.append(table(series, data[series.along]["rows"], data[series.along]["growth"]))
    if not tables:
        raise UserError("no case could be timed; the reason for each case is printed above")
    notes = (f"Ratios of time and memory within a round: median [{INTERVAL}]. {note}",)
    return SuiteResult(data, tuple(tables), notes)


def series_data(series: Series, found: Samples) -> dict[str, Any]:
    """Return the part of the JSON file for one series."""
    rows = rows_of(series, found)
    samples = {name: [asdict(sample) for sample in measured] for name, measured in found.items()}
    growth = growth_by_case(rows) if series.along == "T" else {}
    return {"fixed": series.fixed, "rows": rows, "growth": growth, "samples": samples}


SUITE = Suite(
    "growth",
    "time and memory by sequence length and by model size",
    run,
    options={
        "SHAPE": "T (sequence length) or size (model size); both by default",
        "ROUNDS": "measurements of each case",
        "SECONDS": "timed steps of one measurement",
    },
    rounds={"cpu": 9, "cuda": 3},
    seconds={"cpu": 0.5, "cuda": 6.0},
)
