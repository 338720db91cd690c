"""Measure tokens/s, MFU and peak memory of each variant beside the plain GPT: `make bench`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.cases import BASELINE, BLOCK_STEPS, PLAIN, SHAPES, Shape, find_shapes, select_cases
from bench.runner import PEAKS, Stage, measure_stage
from bench.suite import (
    INTERVAL,
    Columns,
    ResultTable,
    Suite,
    SuiteResult,
    SuiteSession,
    format_ratio,
    format_spread,
)
from runtime.errors import UserError
from runtime.settings import GPT2
from study.planning.micro_batch import free_bytes

PERSISTENT_ROUNDS = 3  # rounds with persistent workers for one round with new workers


def stages(shape: Shape, on_cpu: bool, rounds: int, seconds: float, free: int | None) -> list[Stage]:
    """Split the cases of a shape into stages. Leave out a stage without cases.

    On a GPU: one stage, each turn in a new worker, so that one case at a time occupies the GPU. On a CPU: the plain
    case and the baseline in new workers, then all cases but the plain one in persistent workers, one step a turn and
    PERSISTENT_ROUNDS times the rounds, if they fit. The plain case takes fresh pages from the system in every step; on
    a virtual machine it lost a third of its speed beside persistent workers.
    free: bytes of unused memory, None if unknown.
    """
    if not on_cpu:
        return [Stage(shape, rounds, seconds)]
    first = replace(shape, cases=tuple(case for case in shape.cases if case[0] in (PLAIN, BASELINE)))
    second = replace(shape, cases=tuple(case for case in shape.cases if case[0] != PLAIN))
    together = Stage(second, PERSISTENT_ROUNDS * rounds, 0.0, persistent=True)
    if free is not None and free < len(second.cases) * worker_bytes(shape):
        together = Stage(second, rounds, seconds)
    return [stage for stage in (Stage(first, rounds, seconds), together) if stage.shape.cases]


def worker_bytes(shape: Shape) -> int:
    """Estimate the memory of one worker: weights, gradients and moments, half as much again, and torch."""
    parameters = 12 * shape.layers * shape.width**2 + (GPT2.size + shape.block_size) * shape.width
    return 24 * parameters + 2**29


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
    workers = "each turn in a new process"
    if stage.persistent:
        workers = "the same processes in all rounds, so the intervals are of these processes"
    return ResultTable.of(title, COLUMNS, rows, (f"{workers}, {stage.rounds} rounds",))


def run(session: SuiteSession) -> SuiteResult:
    """Measure the selected cases. Save after every round."""
    peak = session.resolved.target.peak_flops
    shapes = find_shapes(SHAPES[session.resolved.device_class], session.shape)
    shapes = select_cases(shapes, session.cases.split())
    session.say(f"peak {f'{peak / 1e12:.0f} TFLOP/s' if peak else 'unknown'}")
    data: dict[str, Any] = {}
    tables = []
    for shape in shapes:
        for stage in stages(shape, session.on_cpu, session.rounds, session.seconds, free_bytes("cpu")):
            rows = measure_stage(stage, session, data)
            tables += [table(stage, rows)] if rows else []
    if not tables:
        raise UserError("no case could be measured; the reason for each case is printed above")
    return SuiteResult(data, tuple(tables), (note(shapes, session.on_cpu),))


def note(shapes: list[Shape], on_cpu: bool) -> str:
    """Explain the columns."""
    defaults = ", ".join(f"{shape.plain_micro} in {shape.name}" for shape in shapes)
    timed = (
        "Each step is timed."
        if on_cpu
        else f"Steps are timed in blocks of {BLOCK_STEPS}, with one synchronisation."
    )
    return (
        f"plain: a standard GPT-2 training step (bench/reference_gpt.py). batch: micro-batch x accumulation. {timed}\n"
        f"Ratios of tokens/s within a round: median [{INTERVAL}]. to plain: to the plain step at its default "
        f"micro-batch ({defaults}); at its micro, to B: at the same micro-batch.\n"
        "MFU: causal attention counts half (in brackets by nanoGPT's formula: 6 N + 12 L C T FLOPs a token). "
        f"{PEAKS[on_cpu]}"
    )


SUITE = Suite(
    "speed",
    "tokens/s, MFU and peak memory of each variant beside a standard GPT-2 training step",
    run,
    shape="shapes whose name contains this, such as 124m",
    # On a GPU a new process loads torch and compiles in every turn, so the default is below the FEW rounds that an
    # interval needs: the brackets hold the range. ROUNDS=6 gives an interval.
    rounds={"cpu": 6, "card": 3},
    seconds={"cpu": 12.0, "card": 6.0},
    cases='such as "plain B RALEARN@32" (@: one micro-batch)',
)
