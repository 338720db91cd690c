"""Read the monitor's tables as arrays, tensors by steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from referee.numerics.monitor.monitor_tables import read_table

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


def read_series(folder: Path, kind: str, rank: int = 0) -> TensorSeries | None:
    """Read all rows of a kind as arrays; of a step that was written twice the last row counts. None without a row."""
    table = read_table(folder, kind)
    if not table.rows:
        return None
    names = list(dict.fromkeys(row.name for row in table.rows))
    places = {name: place for place, name in enumerate(names)}
    rows = [places[row.name] for row in table.rows]
    steps, columns = np.unique([row.step for row in table.rows], return_inverse=True)
    present = np.zeros((len(names), len(steps)), dtype=bool)
    present[rows, columns] = True
    values = np.full((len(table.columns), *present.shape), np.nan)
    values[:, rows, columns] = np.array([row.values for row in table.rows]).T
    statistics = dict(zip(table.columns, values, strict=True))
    return TensorSeries(kind, rank, names, steps, statistics, present, table.damaged)


def common(first: TensorSeries, second: TensorSeries) -> tuple[TensorSeries, TensorSeries]:
    """Return the parts of both with their common names and steps."""
    theirs = set(second.names)
    names = [name for name in first.names if name in theirs]
    steps = np.intersect1d(first.steps, second.steps)
    return first.cut(names, steps), second.cut(names, steps)
