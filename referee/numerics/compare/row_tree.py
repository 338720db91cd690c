"""The rows of a comparison as a tree: what is around a call, which calls made its inputs, and a divergence at a row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from referee.numerics.compare.compared_rows import UNMATCHED, CallRow, Cell
from referee.numerics.record.read_record import Call, StepRecord, Value
from referee.numerics.rows import TableRow


@dataclass(frozen=True)
class Divergence(TableRow):
    """The first divergence: its row in the table of all commands, and where it is.

    call: with the module around a function, as in "Module.mlp.MLP.forward.0 > Functional.gelu.0.forward".
    """

    module: str = ""  # dotted path of the innermost module
    step: str = ""  # as in "step0/rank0"
    direction: str = "forward"
    order: tuple[int, int] = (0, 0)  # of two ranks, the earlier one is the first
    context: tuple[str, ...] = ()  # calls of one side alone, groups of parameters
    row: CallRow | None = None


class RowTree:
    """The rows of a step of a rank, in the order of execution, with the records of both sides."""

    def __init__(self, rows: Sequence[CallRow], target: StepRecord, golden: StepRecord) -> None:
        self.rows, self.target, self.golden = rows, target, golden
        self.of_target = {row.target.name: row for row in rows if row.target}
        self.of_golden = {row.golden.name: row for row in rows if row.golden}

    def side(self, golden: bool) -> tuple[StepRecord, dict[str, CallRow]]:
        """Return the record of a side, and its rows by the names of its calls."""
        return (self.golden, self.of_golden) if golden else (self.target, self.of_target)

    def forward(self, row: CallRow) -> CallRow | None:
        """Return the row of the forward of a backward."""
        return self.of_golden.get(row.call.forward_name) if row.call.backward else None

    def backward_of(self, row: CallRow) -> CallRow:
        """Return the backward of a forward, be it on one side alone; the forward where there is none."""
        names = {call.name for call in (row.target, row.golden) if call is not None}
        rows = (other for other in self.rows if other.call.backward)
        return next((other for other in rows if other.call.forward_name in names), row)

    # -- what is around a call

    def around(self, row: CallRow) -> Iterator[CallRow]:
        """Return the rows of the calls around a call, the innermost first."""
        record, rows = self.side(row.golden is not None)
        return (rows[name] for name in record.around(row.name) if name in rows)

    def module(self, row: CallRow) -> CallRow | None:
        """Return the row of the innermost module that a call is, or is in."""
        return next((one for one in (row, *self.around(row)) if one.call.is_module), None)

    def outer(self, row: CallRow) -> CallRow | None:
        """Return the row of the innermost compared module around a call."""
        rows = (one for one in self.around(row) if one.grade != UNMATCHED)
        return next((one for one in rows if one.call.is_module), None)

    # -- what made an input

    def maker(self, value: Value | None, golden: bool) -> CallRow | None:
        """Return the row of the call that made a value, as its record says."""
        if value is None:
            return None
        record, rows = self.side(golden)
        return rows.get(record.renamed.get(value.maker, value.maker))

    # -- a divergence

    def divergence(
        self,
        row: CallRow,
        side: str,
        evidence: str,
        value: Cell | TableRow | None = None,
        bound: float = math.nan,
        order: tuple[int, int] | None = None,
    ) -> Divergence:
        """Return the divergence at a row. value: what differs; the largest error of the side where it is None."""
        module, call = self.module(row), row.call
        cells = [cell for cell in row.cells if cell.side == side and not cell.difference.equal]
        value = value or max(cells, key=lambda cell: cell.difference.error, default=None)
        sides = ["", ""]
        if isinstance(value, Cell):
            sides = [part.describe() if part else "absent" for part in (value.target, value.golden)]
        elif value is not None:
            sides = [value.target, value.golden]
        units = row.units(side) if side else math.inf
        return Divergence(
            call=f"{module.name} > {row.name}" if module and not call.is_module else row.name,
            side=value.side if value else "",
            place=value.place if value else "",
            target=sides[0],
            golden=sides[1],
            units=max(row.replayed) if row.replayed and side == "output" else units,
            bound=bound,
            evidence=evidence,
            stack=stack_of(row.target, self.target) or stack_of(row.golden, self.golden),
            module=module.call.path if module else "",
            direction="backward" if call.backward else "forward",
            order=order or (0, row.position),
            context=self._near(row),
            row=row,
        )

    def _near(self, row: CallRow) -> tuple[str, ...]:
        """Return calls of one side alone in the same module, before this one and within it."""
        module = self.outer(row)
        found = [
            f"{'golden' if other.golden else 'target'} alone: {other.name}"
            for other in self.rows
            if other.grade == UNMATCHED
            and other.call.backward == row.call.backward
            and ((outer := self.outer(other)) is row or (outer is module and other.position < row.position))
        ]
        return tuple(found[-5:])


def stack_of(call: Call | None, record: StepRecord) -> tuple[str, ...]:
    """Return the call stack of a call, or of its forward; empty where none is recorded."""
    names = (call.name, call.forward_name) if call else ()
    return next((tuple(record.stacks[name]) for name in names if name in record.stacks), ())


def key(value: Value | None) -> Any:
    """Return what identifies a tensor: shape and statistics."""
    return None if value is None else (value.shape, value.statistics)
