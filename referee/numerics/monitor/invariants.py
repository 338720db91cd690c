"""Check the tables of one run, without a second run: what holds in every sound training.

replicas            gradients after reduction, rates, moments and weights are equal on all ranks, to the last digit
same clipping       so are the clipped gradients
empty gradients     no parameter has a gradient when backward begins
all are trained     no trained parameter stays as it is in every monitored step
one step            a scheduler steps once an update
different data      no two ranks have the same inputs; without their table, the same gradients before reduction
lost gradients      no rank's gradient of a parameter is 0 where another rank's is not
like the others     no largest logit is over 10 times that of every other attention
full precision      no moments or weights of 8 significant bits, as of bfloat16, beside gradients of more
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from referee.errors import NumericsError
from referee.numerics.monitor.monitor_tables import (
    LAYOUT,
    Floats,
    MonitorTables,
    TensorSeries,
    aligned,
    read_tables,
)
from referee.numerics.monitor.targets import KINDS, MOMENTS
from referee.numerics.rows import TableRow, text_table
from referee.numerics.text_files import read_dump_json

LOGIT_FACTOR = 10.0
LEAST_LOGIT = 10.0  # below it no softmax is saturated
LEAST_STEPS = 3  # in which a parameter stays
LEAST_VALUES = 16  # of extremes; one of float32 has 8 significant bits with a probability of about 2^-15
COARSE = 5e-7  # relative error of a table with 6 digits or more
REPLICATED = ("grad_reduced", "grad_clipped", "learning_rate", "update_ratio", *MOMENTS, "param")
EVIDENCE = {
    "data": "data",
    "grad_before": "changed",
    "learning_rate": "setting",
    "param": "parameter",
    **dict.fromkeys(("update_ratio", *MOMENTS), "update"),
}
Found = tuple[int, TableRow]  # step, row


def invariants(run: Path | MonitorTables) -> list[TableRow]:
    """Return what is wrong in the tables of a run, in the order of the steps; nothing of a sound run."""
    run = read_tables(run) if isinstance(run, Path) else run
    found: list[Found] = []
    for ranks, sharded in _groups(run):
        if len(ranks) > 1:
            found += [*_replicas(run, ranks, sharded), *_same_data(run, ranks), *_lost(run, ranks)]
    for table in run.of("grad_before"):
        found += _left_over(table)
    for table in run.of("learning_rate"):
        found += _rates(table)
    for rank in run.ranks[:1]:  # the others have the same weights, or are named above
        found += [*_unchanged(run, rank), *_logits(run.tables.get(("attention", rank))), *_coarse(run, rank)]
    order = list(KINDS)
    found.sort(key=lambda one: (one[0], order.index(one[1].call.partition(" ")[0])))
    return [row for _, row in found]


def add_command(commands: Any) -> None:
    """Add the subcommand."""
    help = "what is wrong in the tables of a monitor"
    parser = commands.add_parser("monitor", description=__doc__, help=help)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="folder of a run, or of ranks")
    parser.set_defaults(run=run_monitor)


def run_monitor(given: argparse.Namespace) -> int:
    run = read_tables(given.folder)
    if not run.folders:
        raise NumericsError(f"{given.folder} has no tables of a monitor; fix: name a folder with rank0")
    print("\n".join(text_table(invariants(run)) or ["nothing is wrong"]))
    return 0


def finding(
    table: TensorSeries,
    name: str,
    step: int,
    value: float | str,
    expected: float | str,
    column: str = "",
    units: float = math.nan,
    bound: float = math.nan,
) -> Found:
    """Return the row of a tensor and a step, after the step. column: the statistic that has the value."""
    target, golden = (one if isinstance(one, str) else f"{one:.6g}" for one in (value, expected))
    place = f"step {step}, rank {table.rank}" if table.rank else f"step {step}"
    call, evidence = f"{table.kind} {name}".strip(), EVIDENCE.get(table.kind, "computed")
    return step, TableRow(call, column, place, target, golden, units, bound, evidence)


# -- ranks


def _groups(run: MonitorTables) -> list[tuple[list[int], set[str]]]:
    """Return the ranks that hold the same weights, with the parameters of which each has a part alone."""
    found: dict[tuple[int, ...], set[str]] = {}
    for folder in run.folders.values():
        layout = read_dump_json(folder / LAYOUT, "remove it") if (folder / LAYOUT).exists() else {}
        replicas = tuple(one for one in layout.get("replicas") or run.ranks if one in run.ranks)
        found.setdefault(replicas, set()).update(layout.get("sharded", ()))
    return [(list(ranks), sharded) for ranks, sharded in found.items()]


def _of_ranks(run: MonitorTables, kind: str, ranks: Sequence[int]) -> list[TensorSeries]:
    """Return the tables of ranks, with the names and steps that all have."""
    found = [table for table in run.of(kind) if table.rank in ranks]
    return aligned(*found) if found else []


def _replicas(run: MonitorTables, ranks: Sequence[int], sharded: set[str]) -> Iterator[Found]:
    """Yield the first value that is not the same on all ranks, of each rank that differs from most."""
    found = []  # step, order of the kind, row, column, tables
    for order, kind in enumerate(REPLICATED):
        read = _of_ranks(run, kind, ranks)
        whole = [name not in sharded for name in read[0].names] if read else []
        for column in read[0].values if read else ():
            values = np.stack([table.values[column] for table in read])
            differs = ~same(values, values[:1]).all(axis=0) & np.array(whole)[:, None]
            differs &= np.all([table.present for table in read], axis=0)
            for at in np.flatnonzero(differs.any(axis=0))[:1]:
                row = int(np.flatnonzero(differs[:, at])[0])
                found.append((int(read[0].steps[at]), order, row, column, int(at), read))
    if not found:
        return
    step, _, row, column, at, read = min(found, key=lambda one: one[:3])
    texts = [f"{column} {table.values[column][row, at]:.9g}" for table in read]
    golden = max(texts, key=texts.count)  # of two ranks the first
    for table, text in zip(read, texts, strict=True):
        if text != golden:
            yield finding(table, table.names[row], step, text, golden)


def same(first: Floats, second: Floats) -> NDArray[np.bool_]:
    """Return where two values are equal, or both NaN."""
    return np.asarray((first == second) | (np.isnan(first) & np.isnan(second)))


def _same_data(run: MonitorTables, ranks: Sequence[int]) -> Iterator[Found]:
    """Yield the first step in which a rank has the inputs, or else the gradients, of a rank before."""
    read = _of_ranks(run, "data", ranks) or _of_ranks(run, "grad_unreduced", ranks)
    for before, table in itertools.combinations(read, 2):
        equal = before.present & table.present
        for column in before.values.keys() & table.values.keys():
            equal &= same(before.values[column], table.values[column])
        if "norm" in before.values and not before.values["norm"].any():
            continue  # gradients of no size
        for at in np.flatnonzero(equal.all(axis=0))[:1] if table.names else ():
            step, row = finding(
                table, table.names[0], int(table.steps[at]), "equal", f"not rank {before.rank}'s"
            )
            yield step, dataclasses.replace(row, evidence="data")
            return


def _lost(run: MonitorTables, ranks: Sequence[int]) -> Iterator[Found]:
    """Yield each gradient that is 0 on one rank and not on another, in its first step."""
    read = [table for table in _of_ranks(run, "grad_unreduced", ranks) if "norm" in table.values]
    norms = np.nan_to_num([table.values["norm"] for table in read])  # 0 without a row
    for table, mine in zip(read, norms, strict=True):
        zero = table.present & (mine == 0) & (norms.max(axis=0) > 0)
        for row in np.flatnonzero(zero.any(axis=1)):
            at = np.flatnonzero(zero[row])[0]
            other = read[int(norms[:, row, at].argmax())].rank
            yield finding(
                table, table.names[row], int(table.steps[at]), "norm 0", f"above 0, as on rank {other}"
            )


# -- one rank


def _left_over(table: TensorSeries) -> Iterator[Found]:
    """Yield the first gradient that is there before backward."""
    sizes = [table.values[name] for name in ("norm", "max", "min") if name in table.values]
    if not sizes:
        return
    there = table.present & np.any([size != 0 for size in sizes], axis=0)
    for at in np.flatnonzero(there.any(axis=0))[:1]:
        row = int(np.flatnonzero(there[:, at])[0])
        yield finding(table, table.names[row], int(table.steps[at]), sizes[0][row, at], "no gradient")


def _rates(table: TensorSeries) -> Iterator[Found]:
    """Yield the first update of two scheduler steps."""
    for row, name in enumerate(table.names):
        counts = table.values["scheduled"][row]
        often = np.diff(counts) > np.diff(table.steps)
        for at in np.flatnonzero(often)[:1]:
            steps = int(table.steps[at + 1] - table.steps[at])
            made = f"{int(counts[at + 1] - counts[at])} steps of the scheduler"
            yield finding(table, name, int(table.steps[at + 1]), made, f"at most {steps}")


def _unchanged(run: MonitorTables, rank: int) -> Iterator[Found]:
    """Yield each parameter that no update changes, though the rate is above 0."""
    rates = run.tables.get(("learning_rate", rank))
    if rates is not None and not np.nan_to_num(rates.values["rate"], nan=1.0).any():
        return
    table = run.tables.get(("update_ratio", rank)) or run.tables.get(("param", rank))
    for row, name in enumerate(table.names if table else ()):
        assert table is not None
        steps = table.steps[table.present[row]]
        columns = {column: numbers[row, table.present[row]] for column, numbers in table.values.items()}
        if "ratio" in columns:
            still = not columns["ratio"].any()
        else:
            still = all(same(values, values[:1]).all() for values in columns.values())
        if still and len(steps) >= LEAST_STEPS:
            yield finding(table, name, int(steps[0]), f"the same in {len(steps)} steps", "changes")


def _logits(table: TensorSeries | None) -> Iterator[Found]:
    """Yield each attention whose largest logit is far above those of all others."""
    if table is None or len(table.names) < 2 or "logit_max" not in table.values:
        return
    logits = np.nan_to_num(table.values["logit_max"], posinf=np.inf, neginf=0.0)
    for row, name in enumerate(table.names):
        others = np.abs(np.delete(logits, row, axis=0)).max(axis=0)
        for at in np.flatnonzero(logits[row] > np.maximum(LEAST_LOGIT, LOGIT_FACTOR * others))[:1]:
            text = f"at most {others[at]:.3g}, as of the others"
            yield finding(table, name, int(table.steps[at]), logits[row, at], text)


def _coarse(run: MonitorTables, rank: int) -> Iterator[Found]:
    if _is_coarse(run.tables.get(("grad_reduced", rank))) is not False:
        return  # the run computes in bfloat16, or has no gradients to compare with
    for kind in (*MOMENTS, "param"):
        table = run.tables.get((kind, rank))
        if table is not None and _is_coarse(table):
            yield finding(table, kind, int(table.steps[0]), "8 significant bits", "as of the gradients")


def _is_coarse(table: TensorSeries | None) -> bool | None:
    """Whether all extremes have 8 significant bits, as bfloat16 has; None for too few values."""
    extremes = [table.values[name] for name in ("min", "max") if name in table.values] if table else []
    values = np.unique(np.array(extremes, dtype=np.float32))
    values = values[np.isfinite(values) & (values != 0) & (values != 1)]
    if len(values) < LEAST_VALUES:
        return None
    fraction, _ = np.frexp(values)
    rounded = np.round(fraction * 2**8) / 2**8
    return bool((np.abs(rounded - fraction) <= COARSE).all())
