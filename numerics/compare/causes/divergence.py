"""A divergence, and the index of the rows by which it is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from numerics.compare.table.rows import UNMATCHED, CallRow, Cell
from numerics.compare.table.step_record import StepRecord, Value


@dataclass(frozen=True)
class Divergence:
    """The first divergence. row: of the table. module: its dotted path. what: the differences, in words.

    cause: "computation", "parameter", "settings", "between" (code between the calls of a module), "overwritten",
    "data", "missing" (a call on one side alone), "gradient" (the gradient that backward starts with), "reduction" (of
    the parameters' gradients) or "optimizer".
    """

    name: str
    row: CallRow
    module: str
    direction: str
    cause: str
    what: list[str]
    units: float
    why: str


class CallIndex:
    """The rows of a comparison, with the modules around each."""

    def __init__(self, rows: Sequence[CallRow], target: StepRecord, golden: StepRecord) -> None:
        self.rows, self.target, self.golden = rows, target, golden
        self.position = {id(row): number for number, row in enumerate(rows)}
        self.by_name = {
            golden: {
                call.name: row for row in rows if (call := row.pair.golden if golden else row.pair.target)
            }
            for golden in (False, True)
        }

    def around(self, row: CallRow) -> set[str]:
        """Return the names of the golden calls around a call."""
        found: set[str] = set()
        outer = self.golden.within(row.name) if row.pair.golden else None
        while outer is not None and outer not in found:
            found.add(outer)
            outer = self.golden.within(outer)
        return found

    def divergence(self, row: CallRow, cause: str, what: list[str], units: float, why: str) -> Divergence:
        module = self.module(row)
        name, call = row.name, row.pair.call
        if not call.is_module and module is not None:
            name = f"{module.name} > {name}"
        path = module.pair.call.path if module is not None else ""
        return Divergence(
            name, row, path, "backward" if call.backward else "forward", cause, what, units, why
        )

    def module(self, row: CallRow) -> CallRow | None:
        """Return the row of the innermost module that the call belongs to."""
        if row.pair.call.is_module:
            return row
        record = self.golden if row.pair.golden else self.target
        outer = record.within(row.name)
        by_name = {
            call.name: other
            for other in self.rows
            for call in (other.pair.golden, other.pair.target)
            if call is not None
        }
        return by_name.get(outer) if outer else None

    def is_repeated(self, row: CallRow) -> bool:
        """Return whether a module call of one side alone is of a module that both sides call: the caller differs."""
        call = row.pair.call
        return call.is_module and any(
            other.pair.target is not None
            and other.pair.golden is not None
            and call.path == (other.pair.golden if row.pair.golden else other.pair.target).path
            and other.pair.call.is_module
            and not other.pair.call.backward
            for other in self.rows
        )

    def outer(self, row: CallRow) -> CallRow | None:
        """Return the row of the innermost matched module around a call."""
        found = self.around_row(row)
        while found is not None and (found.grade == UNMATCHED or not found.pair.call.is_module):
            found = self.around_row(found)
        return found

    def around_row(self, row: CallRow) -> CallRow | None:
        golden = row.pair.golden is not None
        outer = (self.golden if golden else self.target).within(row.name)
        return self.by_name[golden].get(outer) if outer else None


def of_child(found: Divergence, places: set[str]) -> Divergence:
    """Name the module within that has the parameters: it is not called, so the outer call has them."""
    children = {place.rpartition(".")[0] for place in places}
    child = children.pop() if len(children) == 1 else ""
    return replace(found, module=".".join(filter(None, (found.module, child))))


def key(value: Value | None) -> Any:
    """Return what identifies a tensor: shape and statistics."""
    return None if value is None else (value.shape, value.statistics)


def cell_words(cell: Cell) -> str:
    if cell.difference.what:
        return f"{cell.side} {cell.place}: {cell.difference.what}"
    here, there = (value.describe() if value else "absent" for value in (cell.target, cell.golden))
    return f"{cell.side} {cell.place}: {here} against {there}"
