"""Measure tokens/s, MFU and peak memory of each variant beside the plain GPT: `make bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from bench.cases import BASELINE, BLOCK_STEPS, PLAIN, Shape, select_shapes
from bench.runner import Sample, interleaved_rounds, memory_ratio, open_workers, samples_of, speed_ratio
from bench.suite import Options, Session, Suite, SuiteResult
from bench.tables import INTERVAL, Columns, ResultTable, format_ratio, format_spread
from gpt2.config.config import VOCABULARY
from gpt2.system.errors import UserError
from study.memory.micro_batch import free_bytes

PERSISTENT_ROUNDS = 3  # rounds with persistent workers for one round with new workers


@dataclass(frozen=True)
class Stage:
    """Some cases of a shape, with their rounds, the seconds of a turn, and their kind of worker."""

    shape: Shape
    rounds: int
    seconds: float
    persistent: bool = False

    @property
    def name(self) -> str:
        if self.persistent:
            return "the same processes in all rounds, so the intervals are of these processes"
        return "each turn in a new process"


def stages(shape: Shape, on_cpu: bool, rounds: int, seconds: float, free: int | None) -> list[Stage]:
    """Split the cases of a shape into stages. Leave out a stage without cases.

    On a GPU: one stage, each turn in a new worker. On a CPU: the plain case and the baseline in new workers, then all
    cases but the plain one in persistent workers, one step a turn and PERSISTENT_ROUNDS times the rounds, if they fit.
    free: bytes of unused memory, None if unknown.
    """
    if not on_cpu:
        return [Stage(shape, rounds, seconds)]
    first = replace(shape, cases=tuple(case for case in shape.cases if case[0] in (PLAIN, BASELINE)))
    second = replace(shape, cases=tuple(case for case in shape.cases if case[0] != PLAIN))
    alone, together = (
        Stage(first, rounds, seconds),
        Stage(second, PERSISTENT_ROUNDS * rounds, 0.0, persistent=True),
    )
    if free is not None and free < len(second.cases) * worker_bytes(shape):
        together = Stage(second, rounds, seconds)
    return [stage for stage in (alone, together) if stage.shape.cases]


def worker_bytes(shape: Shape) -> int:
    """Estimate the memory of one worker: weights, gradients and moments, half as much again, and torch."""
    parameters = 12 * shape.layers * shape.width**2 + (VOCABULARY + shape.block_size) * shape.width
    return 24 * parameters + 2**29


def rows_of(shape: Shape, samples: Sequence[Sample], peak_flops: float | None) -> list[dict[str, Any]]:
    """Return one row a case: medians, and ratios of speed and memory.

    to_plain: to the plain case at its default micro-batch. to_plain_same_micro, to_baseline: to the plain case and to B
    at the same micro-batch. None if the other case was not measured.
    """
    rows = []
    for case, micro in shape.cases:
        found = samples_of(samples, (case, micro))
        if not found:
            continue
        speed = median(sample.tokens_per_second for sample in found)
        key, plain, baseline = (case, micro), (PLAIN, micro), (BASELINE, micro)
        rows.append(
            {
                "case": case,
                "micro": micro,
                "accumulation": shape.accumulation(micro),
                "tokens_per_second": speed,
                "mfu": speed * found[0].flops_per_token / peak_flops if peak_flops else None,
                "mfu_nanogpt": speed * found[0].nanogpt_flops_per_token / peak_flops if peak_flops else None,
                "peak_bytes": median(sample.peak_bytes for sample in found),
                "to_plain": speed_ratio(samples, key, (PLAIN, shape.plain_micro)),
                "to_plain_same_micro": speed_ratio(samples, key, plain),
                "to_baseline": None if case == PLAIN else speed_ratio(samples, key, baseline),
                "memory_to_plain_same_micro": memory_ratio(samples, key, plain),
            }
        )
    return rows


COLUMNS: Columns = {
    "case": lambda row: row["case"],
    "batch": lambda row: f"{row['micro']} x {row['accumulation']}",
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "MFU": lambda row: f"{row['mfu']:.3f} ({row['mfu_nanogpt']:.3f})" if row["mfu"] else "-",
    "peak GiB": lambda row: f"{row['peak_bytes'] / 2**30:.2f}",
    "to plain": lambda row: format_spread(row["to_plain"]),
    "at its micro": lambda row: format_spread(row["to_plain_same_micro"]),
    "to B": lambda row: format_spread(row["to_baseline"]),
    "memory to plain": lambda row: format_ratio(row["memory_to_plain_same_micro"], ".2f"),
}


def table(stage: Stage, rows: list[dict[str, Any]]) -> ResultTable:
    shape = stage.shape
    each = f"{shape.effective} sequences" if shape.effective else "one micro-batch"
    sizes = f"{shape.layers} layers, width {shape.width}, T = {shape.block_size}"
    title = f"{shape.name}: {sizes}, {each} in an optimizer step"
    return ResultTable.of(title, COLUMNS, rows, (f"{stage.name}, {stage.rounds} rounds",))


def run(options: Options, session: Session) -> SuiteResult:
    """Measure the selected cases. Save after every round."""
    peak = session.resolved.target.peak_flops
    shapes = select_shapes(session.resolved.device_type, options.shape, options.cases.split())
    session.say(f"peak {f'{peak / 1e12:.0f} TFLOP/s' if peak else 'unknown'}")
    data: dict[str, Any] = {"shapes": {shape.name: [] for shape in shapes}}
    tables = []
    for shape in shapes:
        for stage in stages(shape, session.on_cpu, options.rounds, options.seconds, free_bytes("cpu")):
            saved = measure_stage(stage, session, data, peak)
            if saved["rows"]:
                tables.append(table(stage, saved["rows"]))
    if not tables:
        raise UserError("no case could be measured; the reason for each case is printed above")
    return SuiteResult(data, tuple(tables), (note(shapes, session.on_cpu),))


def measure_stage(stage: Stage, session: Session, data: dict[str, Any], peak: float | None) -> dict[str, Any]:
    """Measure a stage, add its results to `data`, and return them. Save after every round."""
    saved: dict[str, Any] = {"stage": stage.name, "sequences_a_step": stage.shape.effective or None}
    data["shapes"][stage.shape.name].append(saved)

    def after_round(samples: list[Sample], skipped: list[str]) -> None:
        saved["rows"] = rows_of(stage.shape, samples, peak)
        saved["samples"] = [asdict(sample) for sample in samples]
        saved["skipped"] = skipped
        session.save(data)

    with open_workers(stage.persistent) as measure:
        interleaved_rounds(stage.shape, stage.rounds, stage.seconds, session.say, measure, after_round)
    return saved


def note(shapes: list[Shape], on_cpu: bool) -> str:
    """Explain the columns."""
    defaults = ", ".join(f"{shape.plain_micro} in {shape.name}" for shape in shapes)
    blocks = f"Steps are timed in blocks of {BLOCK_STEPS}, with one synchronisation at the end of a block."
    timed = "Each step is timed separately." if on_cpu else blocks
    return (
        "plain: a standard GPT-2 training step (bench/reference_gpt.py) with the attention kernel that torch prefers. "
        f"batch: micro-batch x accumulation. {timed}\n"
        f"Ratios of tokens/s within a round: median [{INTERVAL}]. to plain: to the plain step at its default "
        f"micro-batch ({defaults}); at its micro: to the plain step at the same micro-batch; to B: to B at the same "
        "micro-batch.\n"
        "MFU = tokens/s x FLOPs a token / peak FLOP/s of the card. FLOPs: 6 a matrix weight, causal attention at half "
        "(in brackets nanoGPT's formula: 6 N + 12 L C T). Peak memory: of the timed steps, without compilation."
    )


SUITE = Suite(
    "speed",
    "tokens/s, MFU and peak memory of each variant beside a standard GPT-2 training step",
    run,
    options={
        "SHAPE": "shapes whose name contains this, such as 124m",
        "ROUNDS": "measurements of each case",
        "SECONDS": "timed steps of one measurement in a new process",
        "CASES": 'such as "plain B RALEARN@32" (@: one micro-batch)',
    },
    # On a GPU a new process loads torch and compiles in every turn, so the default is below the FEW rounds that an
    # interval needs: the brackets hold the range. ROUNDS=6 gives an interval.
    rounds={"cpu": 6, "cuda": 3},
    seconds={"cpu": 12.0, "cuda": 6.0},
)
