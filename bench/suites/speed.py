"""Measure tokens/s, MFU and peak memory of each variant beside the plain GPT: `make bench`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.cases import BLOCK_STEPS, SHAPES, find_shapes, select_cases
from bench.runner import PEAKS, measure_shape
from bench.suite import INTERVAL, Columns, Suite, SuiteSession, format_ratio, format_spread, format_table
from runtime.errors import UserError

COLUMNS: Columns = {
    "case": lambda row: row["case"],
    "batch": lambda row: f"{row['micro']} x {row['accumulation']}",
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "MFU": lambda row: format_ratio(row["mfu"], ".3f"),
    "peak GiB": lambda row: f"{row['peak_bytes'] / 2**30:.2f}",
    "to plain": lambda row: format_spread(row["to_plain"]),
    "at its micro": lambda row: format_spread(row["to_plain_same_micro"]),
    "to B": lambda row: format_spread(row["to_baseline"]),
    "memory to plain": lambda row: format_ratio(row["memory_to_plain_same_micro"], ".2f"),
}


def run(session: SuiteSession) -> tuple[Mapping[str, Any], list[str]]:
    """Measure the selected cases. Save after every round."""
    data: dict[str, Any] = {}
    tables = []
    names = session.cases.split()
    listed = find_shapes(SHAPES[session.resolved.device_class], session.shape)
    for shape in [select_cases(shape, names) for shape in listed]:
        rows = measure_shape(shape, session, data)
        each = f"{shape.effective} sequences" if shape.effective else "one micro-batch"
        sizes = f"{shape.layers} layers, width {shape.width}, T = {shape.block_size}"
        title = f"{shape.name}: {sizes}, {each} in an optimizer step; plain's default micro-batch: {shape.plain_micro}"
        tables += [format_table(title, COLUMNS, rows)] if rows else []
    if not tables:
        raise UserError("no case could be measured; the reason for each case is printed above")
    return data, [*tables, note(session.on_cpu)]


def note(on_cpu: bool) -> str:
    """Explain the columns."""
    timed = "each step" if on_cpu else f"blocks of {BLOCK_STEPS} steps, with one synchronisation"
    return (
        f"plain: a standard GPT-2 training step (bench/reference_gpt.py). batch: micro-batch x accumulation. "
        f"Timed: {timed}.\n"
        f"Ratios of tokens/s within a round: median [{INTERVAL}]. to plain: to the plain step at its default "
        "micro-batch; at its micro, to B: at the same micro-batch.\n"
        f"MFU: causal attention counts half. {PEAKS[on_cpu]}"
    )


SUITE = Suite(
    "speed",
    "tokens/s, MFU and peak memory of each variant beside a standard GPT-2 training step",
    run,
    rounds=6,
    seconds=6.0,
    cases=True,
)
