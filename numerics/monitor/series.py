"""The tables of a monitor as arrays: one kind of tensor of one rank by steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from numerics.errors import NumericsError
from numerics.monitor.tables import read_file, table_files

Floats = NDArray[np.float64]


@dataclass
class TensorSeries:
    """One kind of a rank as arrays.

    values: statistic -> (tensors, steps), NaN also where there is no row. present: (tensors, steps), where one is.
    """

    kind: str
    rank: int
    names: list[str]
    steps: NDArray[np.int64]
    values: dict[str, Floats]
    present: NDArray[np.bool_]
    damaged: int = 0

    def cut(self, names: Sequence[str], steps: NDArray[np.int64]) -> TensorSeries:
        """Return the part with these names and steps, which it has, in their order."""
        rows = np.array([self.names.index(name) for name in names], dtype=np.int64)
        at = np.ix_(rows, np.searchsorted(self.steps, steps))
        values = {column: numbers[at] for column, numbers in self.values.items()}
        return TensorSeries(self.kind, self.rank, list(names), steps, values, self.present[at])


def common(first: TensorSeries, second: TensorSeries) -> tuple[TensorSeries, TensorSeries]:
    """Return the parts of both with their common names and steps."""
    theirs = set(second.names)
    names = [name for name in first.names if name in theirs]
    steps = np.intersect1d(first.steps, second.steps)
    return first.cut(names, steps), second.cut(names, steps)


def read_series(folder: Path, kind: str, rank: int = 0) -> TensorSeries | None:
    """Read all rows of a kind as arrays; of a step that was written twice the last row counts. None without a row."""
    names: dict[str, int] = {}
    blocks: list[tuple[NDArray[np.int64], NDArray[np.int64], Floats]] = []
    columns: tuple[str, ...] = ()
    damaged = 0
    for path in table_files(folder).get(kind, []):
        table = read_file(path)
        damaged += table.damaged
        if not table.rows:
            continue
        if columns and table.columns != columns:
            raise NumericsError(f"{path} has other columns than the files before; fix: separate them")
        columns = table.columns
        at = np.array([names.setdefault(row.name, len(names)) for row in table.rows])
        steps = np.array([row.step for row in table.rows], dtype=np.int64)
        blocks.append((at, steps, np.array([row.values for row in table.rows])))
    if not blocks:
        return None
    at, every, numbers = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    steps, places = np.unique(every, return_inverse=True)
    values = {column: np.full((len(names), len(steps)), np.nan) for column in columns}
    present = np.zeros((len(names), len(steps)), dtype=bool)
    present[at, places] = True
    for number, column in enumerate(columns):
        values[column][at, places] = numbers[:, number]
    return TensorSeries(kind, rank, list(names), steps, values, present, damaged)
