"""Measure how time and memory grow with sequence length and model size: `make bench SUITE=growth`.

On a CPU, peaks come from a separate worker: the heap of a training process keeps freed buffers, so that the resident
peak varies. Under EXACT_HEAP the resident set is the allocated memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import linear_regression, median
from typing import Any

from bench import workers
from bench.cases import BASELINE, Shape
from bench.runner import (
    Case,
    OpenWorkers,
    Sample,
    interleaved_rounds,
    memory_ratio,
    samples_of,
    speed_ratios,
    workers_for,
)
from bench.suite import Options, Session, Suite, SuiteResult
from bench.tables import INTERVAL, ResultTable, format_spread, mebibytes, spread
from bench.workers import BenchError
from gpt2.memory.measure import EXACT_HEAP
from gpt2.system.errors import UserError

VARIANTS = ("B", "RAALL", "RALEARN")
LENGTHS = (256, 512, 1024, 2048, 4096)
HEAD_SIZE = 64
PEAK_STEP = "bench.suites.growth:peak_step"
KNEE = (
    "The loss works in chunks of rows. A micro-batch with fewer rows than one chunk has a smaller chunk, so the line "
    "bends at short T."
)
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
PARTS = ("T", "size")


def measure_peak(shape: Shape, case: str, micro: int) -> int:
    """Return the peak bytes of one optimizer step on a CPU, from a new worker under EXACT_HEAP."""
    arguments = {"shape": shape.as_json(), "case": case, "micro": micro}
    label = f"peak of {workers.case_label(shape, case, micro)}"
    limit = workers.FIRST_ANSWER_SECONDS
    return int(workers.call_in_worker(label, PEAK_STEP, arguments, EXACT_HEAP, limit)["peak_bytes"])


def peak_step(shape: dict[str, Any], case: str, micro: int) -> dict[str, int]:
    """Measure one optimizer step on a CPU, in a worker: growth of the resident set, weights included.

    The evaluation is left out: its batch has the same number of tokens at every T.
    """
    import torch

    from bench.case_step import model_and_attention, optimizer_config
    from gpt2.hardware.cpu import cpu_threads
    from gpt2.memory.workload import StepWorkload
    from gpt2.train.peak_memory import PeakMeter

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


def measure_series(
    series: Series,
    rounds: int,
    seconds: float,
    say: Callable[[str], None],
    open_workers: OpenWorkers,
    peak: Callable[[Shape, str, int], int] | None = None,
    save: Callable[[dict[str, list[Sample]]], None] = lambda found: None,
) -> dict[str, list[Sample]]:
    """Measure all shapes and return their samples by shape.

    peak: measures memory separately, once a case; without it the timed process gives it. save: gets all samples so far
    after each shape, and without `peak` after each round.
    """
    found: dict[str, list[Sample]] = {}
    for shape in series.shapes:

        def after_round(samples: list[Sample], skipped: list[str], name: str = shape.name) -> None:
            if not peak:
                save(found | {name: samples})

        with open_workers() as measure:
            samples = interleaved_rounds(shape, rounds, seconds, say, measure, after_round)
        if peak:
            peaks: dict[Case, int] = {}
            for case, micro in dict.fromkeys((s.case, s.micro) for s in samples):
                try:
                    peaks[case, micro] = peak(shape, case, micro)
                except BenchError as error:
                    say(f"skipped: {error}")
                    continue
                say(f"peak of {series.along} {shape.name}  {case}: {peaks[case, micro] / 2**20:,.0f} MiB")
            known = [s for s in samples if (s.case, s.micro) in peaks]
            samples = [replace(s, peak_bytes=peaks[s.case, s.micro]) for s in known]
        found[shape.name] = samples
        save(found)
    return found


def rows_of(series: Series, found: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """Return one row a shape and case: medians over the rounds, and time and memory as multiples of B's."""
    rows = []
    for shape in series.shapes:
        samples = found.get(shape.name, [])
        for case, micro in shape.cases:
            own = samples_of(samples, (case, micro))
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
                    # the speed of B over that of the case is the time of the case over that of B
                    "time_to_baseline": (
                        None if case == BASELINE else spread(speed_ratios(samples, base, (case, micro)))
                    ),
                    "memory_to_baseline": memory_ratio(samples, (case, micro), base),
                }
            )
    return rows


@dataclass(frozen=True)
class Line:
    """Least-squares line of peak bytes over T. deviation: the largest distance from it as a share of the peak.

    first: smallest T of the fit. last_doubling: log2 of the growth of the peak over log2 of the growth of T, between
    the last two T: at most 1 for a straight line with a positive start, 2 for a square law.
    """

    first: int
    start_bytes: float
    bytes_per_token: float
    deviation: float
    last_doubling: float


def fit_line(points: Sequence[tuple[int, float]]) -> Line | None:
    """Fit a line through (T, peak bytes). None for fewer than three points, which every line fits."""
    if len(points) < 3:
        return None
    lengths, peaks = zip(*sorted(points), strict=True)
    slope, start = linear_regression(lengths, peaks)
    deviation = max(abs(start + slope * T - peak) / peak for T, peak in zip(lengths, peaks, strict=True))
    doubling = math.log(peaks[-1] / peaks[-2]) / math.log(lengths[-1] / lengths[-2])
    return Line(lengths[0], start, slope, deviation, doubling)


def fit_lines(rows: list[dict[str, Any]], knee: int) -> dict[str, list[dict[str, float]]]:
    """Fit each variant's peaks over T twice: through all points, and through those from T = `knee` on.

    The loss takes its rows in chunks (gpt2.model.loss). knee: the smallest T at which a micro-batch fills one chunk;
    below it a longer sequence also enlarges the chunk.
    """
    found = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        points = sorted((row["T"], row["peak_bytes"]) for row in rows if row["case"] == case)
        behind = [point for point in points if point[0] >= knee]
        lines = (fit_line(points), fit_line(behind) if behind != points else None)
        found[case] = [asdict(line) for line in lines if line]
    return {case: lines for case, lines in found.items() if lines}


def table(series: Series, rows: list[dict[str, Any]], fits: dict[str, list[dict[str, float]]]) -> ResultTable:
    columns = {
        series.along: lambda row: str(row[series.along]),
        "case": lambda row: row["case"],
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "step ms": lambda row: f"{1000 * row['step_seconds']:,.1f}",
        "peak MiB": lambda row: mebibytes(row["peak_bytes"]),
        "time to B": lambda row: format_spread(row["time_to_baseline"], ".3f"),
        "memory to B": lambda row: f"{row['memory_to_baseline']:.3f}" if row["memory_to_baseline"] else "-",
    }
    notes = [
        f"peak of {case} from T = {fit['first']} on: {fit['start_bytes'] / 2**20:,.0f} MiB + "
        f"{fit['bytes_per_token'] / 2**10:,.1f} KiB for each of T; at most {fit['deviation']:.1%} off that line; last "
        f"doubling: T^{fit['last_doubling']:.2f}"
        for case, lines in fits.items()
        for fit in lines
    ]
    if any(len(lines) > 1 for lines in fits.values()):
        notes.append(KNEE)
    return ResultTable.of(f"cost by {series.along} ({series.fixed})", columns, rows, notes)


def run(options: Options, session: Session) -> SuiteResult:
    """Measure both series, or the one that SHAPE names. Save after every round, on a CPU after every shape."""
    if options.shape not in ("", *PARTS):
        raise UserError(f"unknown part SHAPE={options.shape}; parts: {', '.join(PARTS)}")
    note = ON_A_CPU if session.on_cpu else ON_A_GPU
    data: dict[str, Any] = {"memory": note}
    tables = []
    for series in SERIES[session.resolved.device_type]:
        if options.shape not in ("", series.along):
            continue

        def save(found: dict[str, list[Sample]], series: Series = series) -> None:
            data[series.along] = series_data(series, found, session.on_cpu)
            session.save(data)

        peak = measure_peak if session.on_cpu else None
        measure_series(
            series, options.rounds, options.seconds, session.say, workers_for(session.on_cpu), peak, save
        )
        if data[series.along]["rows"]:
            tables.append(table(series, data[series.along]["rows"], data[series.along]["lines"]))
    if not tables:
        raise UserError("no case could be timed; the reason for each case is printed above")
    notes = (f"Ratios of time and memory within a round: median [{INTERVAL}]. {note}",)
    return SuiteResult(data, tuple(tables), notes)


def series_data(series: Series, found: dict[str, list[Sample]], on_cpu: bool) -> dict[str, Any]:
    """Return the part of the JSON file for one series."""
    from gpt2.model.loss import CHUNK_ROWS

    rows = rows_of(series, found)
    rows_at_once = CHUNK_ROWS["cpu" if on_cpu else "cuda"]
    micro = series.shapes[0].cases[0][1]
    lines = fit_lines(rows, -(-rows_at_once // micro)) if series.along == "T" else {}
    samples = {name: [asdict(sample) for sample in own] for name, own in found.items()}
    return {"fixed": series.fixed, "rows": rows, "lines": lines, "samples": samples}


SUITE = Suite(
    name="growth",
    help="time and memory by sequence length and by model size",
    run=run,
    options={
        "SHAPE": "T (sequence length) or size (model size); both by default",
        "ROUNDS": "measurements of each case",
        "SECONDS": "timed steps of one measurement",
    },
    rounds={"cpu": 9, "cuda": 3},
    seconds={"cpu": 0.5, "cuda": 6.0},
)
