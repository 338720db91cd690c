"""Measure how time and memory grow with sequence length and model size: `make bench SUITE=growth`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bench.cases import VARIANTS, Shape
from bench.runner import PEAKS, measure_shape
from bench.suite import INTERVAL, Columns, Suite, SuiteSession, format_ratio, format_spread, format_table
from runtime.errors import UserError

LENGTHS = (256, 512, 1024, 2048, 4096)
HEAD_SIZE = 64


def shape_of(layers: int, width: int, block_size: int, micro: int) -> Shape:
    cases = tuple((variant, micro) for variant in VARIANTS)
    name = f"{layers}x{width}-t{block_size}"
    return Shape(name, layers, width // HEAD_SIZE, width, block_size, cases)


SERIES = {  # kind of device -> what differs -> shapes
    "cpu": {
        "T": [shape_of(4, 256, T, 1) for T in LENGTHS],
        "size": [shape_of(*size, 256, 2) for size in ((2, 128), (4, 256), (6, 384), (12, 768))],
    },
    "card": {
        "T": [shape_of(12, 768, T, 4) for T in LENGTHS],
        "size": [shape_of(*size, 1024, 8) for size in ((12, 768), (24, 1024), (36, 1280))],
    },
}
COLUMNS: Columns = {
    "shape": lambda row: row["shape"],
    "case": lambda row: row["case"],
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "step ms": lambda row: f"{1000 * row['step_seconds']:,.1f}",
    "peak MiB": lambda row: f"{row['peak_bytes'] / 2**20:,.0f}",
    "speed to B": lambda row: format_spread(row["to_baseline"], ".3f"),
    "memory to B": lambda row: format_ratio(row["memory_to_baseline"], ".3f"),
}


def run(session: SuiteSession) -> tuple[Mapping[str, Any], list[str]]:
    """Measure both series, or the one that SHAPE names. Save after every round."""
    series = SERIES[session.resolved.device_class]
    if session.shape not in ("", *series):
        raise UserError(f"unknown part SHAPE={session.shape}; fix: SHAPE= one of {', '.join(series)}")
    data: dict[str, Any] = {}
    tables = []
    for along in [session.shape] if session.shape else series:
        rows = [row for shape in series[along] for row in measure_shape(shape, session, data)]
        notes = growth_of_peaks(rows) if along == "T" else []
        tables += [format_table(f"cost by {along}", COLUMNS, rows, notes)] if rows else []
    if not tables:
        raise UserError("no case could be measured; the reason for each case is printed above")
    return data, [*tables, f"Ratios of speed within a round: median [{INTERVAL}]. {PEAKS[session.on_cpu]}"]


def growth_of_peaks(rows: list[dict[str, Any]]) -> list[str]:
    """State for each case how its peak grows between the last two lengths: bytes for each of T, and p of T^p."""
    notes = []
    for case in dict.fromkeys(row["case"] for row in rows):
        points = sorted((row["block_size"], row["peak_bytes"]) for row in rows if row["case"] == case)[-2:]
        if len(points) == 2:
            (T, low), (longest, high) = points
            slope, power = (high - low) / (longest - T), math.log(high / low) / math.log(longest / T)
            notes.append(
                f"peak of {case} from T = {T} to {longest}: {slope / 2**10:,.1f} KiB for each of T; "
                f"it grows as T^{power:.2f}"
            )
    return notes


SUITE = Suite("growth", "time and memory by sequence length and by model size", run, rounds=3, seconds=3.0)
