"""Format results: medians with their intervals, and tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from referee.pages.document import align_columns

FEW = 6  # rounds from which a median has a 95 % interval within their range
INTERVAL = f"95 % interval; below {FEW} rounds the range"

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]  # head -> text of a row's cell


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return median, least, most, and the interval of the median (low, high); None for no values.

    The interval is that of the order statistics (an inverted sign test) with 95 % coverage or a little more, for
    independent rounds. Below FEW rounds it is the range.
    """
    if not values:
        return None
    ordered, n = sorted(values), len(values)
    rank, below = 0, 0.0
    while rank < n // 2 and (below := below + math.comb(n, rank) / 2**n) <= 0.025:
        rank += 1
    outside = max(rank - 1, 0)  # values on either side that lie outside the interval
    low, high = ordered[outside], ordered[n - 1 - outside]
    return {"median": median(values), "low": low, "high": high, "least": ordered[0], "most": ordered[-1]}


def format_spread(value: Mapping[str, float] | None, form: str = ".2f", scale: float = 1.0) -> str:
    """Write a spread as "1.12 [1.05, 1.19]"; "-" for None."""
    if value is None:
        return "-"
    middle, low, high = (f"{value[key] * scale:{form}}" for key in ("median", "low", "high"))
    return f"{middle} [{low}, {high}]"


def format_ratio(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def mebibytes(value: float | None) -> str:
    """Write bytes as MiB; "-" for none."""
    return f"{value / 2**20:,.0f}" if value else "-"


@dataclass(frozen=True)
class ResultTable:
    """A table for the terminal: a title, aligned columns, and notes under them."""

    title: str
    head: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, title: str, columns: Columns, rows: Iterable[Row], notes: Sequence[str] = ()) -> ResultTable:
        cells = tuple(tuple(text(row) for text in columns.values()) for row in rows)
        return cls(title, tuple(columns), cells, tuple(notes))

    def __str__(self) -> str:
        lines = align_columns([self.head, *self.cells], range(len(self.head)))
        return "\n".join([self.title, *lines, *self.notes])
