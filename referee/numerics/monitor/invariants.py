"""Check the tables of one run, without a second run: what holds in every sound training, and tensors unlike their like.

replicas            gradients after reduction, rates, moments and weights are equal on all ranks, to the last digit
same clipping       so are the clipped gradients
empty gradients     no parameter has a gradient when backward begins
all are trained     no trained parameter stays as it is in every monitored step
rate as scheduled   the rate is that of the schedule, and a scheduler steps once an update
different data      no two ranks have the same inputs; without their table, the same gradients before reduction
lost gradients      no rank's gradient of a parameter is 0 where another rank's is not
like their role     no update is over 100 times those of every parameter of its role, its name without the number
like the others     no largest logit is over 10 times that of every other attention
full precision      no moments or weights of 8 significant bits, as of bfloat16, beside gradients of more
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from referee.errors import NumericsError
from referee.numerics.monitor.monitor_tables import (
    KINDS,
    LAYOUT,
    MOMENTS,
    Floats,
    TensorSeries,
    aligned,
    rank_folders,
    read_series,
)
from referee.numerics.rows import TableRow, text_table
from referee.numerics.text_files import read_dump_json

UPDATE_FACTOR, LOGIT_FACTOR = 100.0, 10.0
LEAST_LOGIT = 10.0  # below it no softmax is saturated
LEAST_STEPS = 3  # in which a parameter stays, or an update is too large
LEAST_VALUES = 16  # of extremes; one of float32 has 8 significant bits with a probability of about 2^-15
COARSE = 5e-7  # relative error of a table with 6 digits or more
RATE = 1e-6  # relative difference of a rate from its schedule
REPLICATED = ("grad_reduced", "grad_clipped", "learning_rate", "update_ratio", *MOMENTS, "param")
EVIDENCE = {
    "data": "data",
    "grad_before": "changed",
    "learning_rate": "setting",
    "param": "parameter",
    **dict.fromkeys(("update_ratio", *MOMENTS), "update"),
}
Found = tuple[int, TableRow]  # step, row


class RankTables:
    """The tables of all ranks, each read once."""

    def __init__(self, folder: Path) -> None:
        self.folders = rank_folders(folder)
        self.ranks = list(self.folders)
        self._read: dict[tuple[str, int], TensorSeries | None] = {}

    def of(self, kind: str, rank: int) -> TensorSeries | None:
        """Return the table of a kind and a rank; None without a row."""
        key = kind, rank
        if key not in self._read:
            self._read[key] = read_series(self.folders[rank], kind, rank)
        return self._read[key]

    def of_ranks(self, kind: str, ranks: Sequence[int]) -> list[TensorSeries]:
        """Return the tables of ranks, with the names and steps that all have; of ranks without a row none."""
        found = [table for rank in ranks if (table := self.of(kind, rank))]
        return aligned(*found) if found else []

    def groups(self) -> list[tuple[list[int], set[str]]]:
        """Return the ranks that hold the same weights, with the parameters of which each has a part alone."""
        found: dict[tuple[int, ...], set[str]] = {}
        for rank in self.ranks:
            path = self.folders[rank] / LAYOUT
            layout = read_dump_json(path, "remove it") if path.exists() else {}
            replicas = tuple(one for one in layout.get("replicas") or self.ranks if one in self.ranks)
            found.setdefault(replicas, set()).update(layout.get("sharded", ()))
        return [(list(ranks), sharded) for ranks, sharded in found.items()]


def invariants(folder: Path) -> list[TableRow]:
    """Return what is wrong in the tables of <run>/monitor, in the order of the steps; nothing of a sound run."""
    tables = RankTables(folder)
    found: list[Found] = []
    for ranks, sharded in tables.groups():
        if len(ranks) > 1:
            found += [*_replicas(tables, ranks, sharded), *_same_data(tables, ranks), *_lost(tables, ranks)]
    for rank in tables.ranks:
        found += [*_left_over(tables.of("grad_before", rank)), *_rates(tables.of("learning_rate", rank))]
    for rank in tables.ranks[:1]:  # the others have the same weights, or are named above
        found += [*_unchanged(tables, rank), *_large_updates(tables.of("update_ratio", rank))]
        found += [*_logits(tables.of("attention", rank)), *_coarse(tables, rank)]
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
    folder = given.folder / "monitor" if (given.folder / "monitor").is_dir() else given.folder
    if not rank_folders(folder):
        raise NumericsError(f"{folder} has no tables of a monitor; fix: name a folder with rank0")
    print("\n".join(text_table(invariants(folder)) or ["nothing is wrong"]))
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


def _replicas(tables: RankTables, ranks: Sequence[int], sharded: set[str]) -> Iterator[Found]:
    """Yield the first value that is not the same on all ranks, of each rank that differs from most."""
    found = []  # step, order of the kind, row, column, tables
    for order, kind in enumerate(REPLICATED):
        read = tables.of_ranks(kind, ranks)
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


def _same_data(tables: RankTables, ranks: Sequence[int]) -> Iterator[Found]:
    """Yield the first step in which a rank has the inputs, or else the gradients, of a rank before."""
    read = tables.of_ranks("data", ranks) or tables.of_ranks("grad_unreduced", ranks)
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


def _lost(tables: RankTables, ranks: Sequence[int]) -> Iterator[Found]:
    """Yield each gradient that is 0 on one rank and not on another, in its first step."""
    read = [table for table in tables.of_ranks("grad_unreduced", ranks) if "norm" in table.values]
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


def _left_over(table: TensorSeries | None) -> Iterator[Found]:
    """Yield the first gradient that is there before backward."""
    sizes = [table.values[name] for name in ("norm", "max", "min") if name in table.values] if table else []
    if table is None or not sizes:
        return
    there = table.present & np.any([size != 0 for size in sizes], axis=0)
    for at in np.flatnonzero(there.any(axis=0))[:1]:
        row = int(np.flatnonzero(there[:, at])[0])
        yield finding(table, table.names[row], int(table.steps[at]), sizes[0][row, at], "no gradient")


def _rates(table: TensorSeries | None) -> Iterator[Found]:
    """Yield the first rate of a group that is not the schedule's, and the first update of two scheduler steps."""
    if table is None:
        return
    for row, name in enumerate(table.names):
        rates, expected, counts = (table.values[column][row] for column in KINDS["learning_rate"])
        wrong = np.abs(rates - expected) > RATE * np.abs(expected)  # False where no schedule is known
        for at in np.flatnonzero(wrong)[:1]:
            yield finding(table, name, int(table.steps[at]), rates[at], expected[at])
        often = np.diff(counts) > np.diff(table.steps)
        for at in np.flatnonzero(often)[:1]:
            steps = int(table.steps[at + 1] - table.steps[at])
            made = f"{int(counts[at + 1] - counts[at])} steps of the scheduler"
            yield finding(table, name, int(table.steps[at + 1]), made, f"at most {steps}")


def _unchanged(tables: RankTables, rank: int) -> Iterator[Found]:
    """Yield each parameter that no update changes, though the rate is above 0."""
    rates = tables.of("learning_rate", rank)
    if rates is not None and not np.nan_to_num(rates.values["rate"], nan=1.0).any():
        return
    table = tables.of("update_ratio", rank) or tables.of("param", rank)
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


def _large_updates(table: TensorSeries | None) -> Iterator[Found]:
    """Yield each parameter with updates over UPDATE_FACTOR times those of every other one of its role.

    One that was zero, as new biases are, has updates of any size.
    """
    if table is None:
        return
    ratios = np.where(table.present, table.values["ratio"], np.nan)
    roles = [re.sub(r"\d+", "*", name) for name in table.names]
    for row, name in enumerate(table.names):
        alike = [other for other, role in enumerate(roles) if role == roles[row] and other != row]
        if not alike or np.isinf(ratios[row]).any():
            continue
        highest = np.nan_to_num(ratios[alike], nan=0.0, posinf=np.inf).max(axis=0)
        large = np.flatnonzero((ratios[row] > UPDATE_FACTOR * highest) & (highest > 0))
        if len(large) >= LEAST_STEPS:
            at = large[0]
            yield finding(table, name, int(table.steps[at]), ratios[row, at], f"at most {highest[at]:.3g}")


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


def _coarse(tables: RankTables, rank: int) -> Iterator[Found]:
    if _is_coarse(tables.of("grad_reduced", rank)) is not False:
        return  # the run computes in bfloat16, or has no gradients to compare with
    for kind in (*MOMENTS, "param"):
        table = tables.of(kind, rank)
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
