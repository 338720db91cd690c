"""Name calls and gradients that one side alone has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from numerics.compare.causes.divergence import CallIndex, Divergence, key, of_child
from numerics.compare.table.rows import UNMATCHED, CallRow
from numerics.compare.table.step_record import StepRecord


class Missing:
    """The calls and gradients of one side alone, and whether they count."""

    def __init__(self, index: CallIndex) -> None:
        self.index, self.rows = index, index.rows

    def is_judged(self, row: CallRow) -> bool:
        """Return whether both sides were recorded with the settings that record such a call."""
        changed = changed_selection(self.index.target, self.index.golden)
        if self.index.target.by_msprobe != self.index.golden.by_msprobe or changed - {"level", "construct"}:
            return False
        levels = {record.selection.get("level") for record in (self.index.target, self.index.golden)}
        return not changed or (row.pair.call.is_module and "L1" not in levels)

    def alone_within(self, row: CallRow) -> CallRow | None:
        """Return the first module call of one side alone within a call."""
        return next(
            (
                other
                for other in self.rows
                if other.grade == UNMATCHED
                and other.pair.call.is_module
                and other.pair.call.backward == row.pair.call.backward
                and self.index.outer(other) is row
                and self.is_judged(other)
            ),
            None,
        )

    def dropped(self, row: CallRow, alone: CallRow) -> Divergence:
        """Name the call of one side alone that explains a wrong result around it."""
        what = [*row.settings, *row.words("output")]
        if row.pair.call.backward:
            why = f"{_no_gradient(alone)}, and the gradient that {row.name} returns differs"
            return self.index.divergence(row, "missing", what, row.units("output"), why)
        why = f"{_in_one(alone)}, and the result of {row.name} differs"
        if self.index.is_repeated(alone):
            why = f"it calls {alone.pair.call.path} once more on one side: {why}"
            return self.index.divergence(
                row, "settings" if row.settings else "missing", what, row.units("output"), why
            )
        return self.index.divergence(alone, "missing", what, row.units("output"), why)

    def first(self) -> Divergence | None:
        """Name the first call or gradient of one side alone that counts."""
        judged = [row for row in self.rows if row.grade == UNMATCHED and self.is_judged(row)]
        counted = [row for row in judged if not self._is_harmless(row)]
        gaps = [row for row in self.rows if row.gaps]
        trained = any(row.pair.call.backward for row in self.rows)
        frozen = next((row for row in self.rows if trained and row.flags), None)
        forward = next((row for row in counted if not row.pair.call.backward), None)
        if forward is not None:
            return self._one_side(forward, [])
        if frozen is not None:
            found = self._one_side(self._backward_of(frozen), frozen.flags)
            return of_child(found, {text.split(":")[0].split(" ")[1] for text in frozen.flags})
        if not counted and not gaps:
            return None
        modules = [row for row in counted if row.pair.call.is_module]
        cut = next((row for row in self.rows if row.detached and row.pair.call.is_module), None)
        if cut is not None and (modules or gaps):
            return self._one_side(self._backward_of(cut), cut.detached)
        row = next(iter([*modules, *gaps, *counted]))
        return self._one_side(row, row.gaps)

    def _one_side(self, row: CallRow, what: list[str]) -> Divergence:
        others = [other.name for other in self.rows if other.grade == UNMATCHED and other.pair.call.is_module]
        why = _no_gradient(row, what) if row.pair.call.backward or what else _in_one(row)
        lacking = self.index.target if row.pair.golden and not row.pair.target else self.index.golden
        if row.grade == UNMATCHED and not lacking.complete:
            why += "; that record is not complete"
        if others:
            what = [*what, f"{len(others)} calls of modules are on one side alone: {', '.join(others[:5])}"]
        found = self.index.divergence(row, "missing", what, math.inf, why)
        return replace(
            found, direction="backward" if row.pair.call.backward or row.flags or row.detached else "forward"
        )

    def _backward_of(self, row: CallRow) -> CallRow:
        """Return the backward of a forward, be it on one side alone; the forward where there is none."""
        names = {call.name for call in (row.pair.target, row.pair.golden) if call is not None}
        return next(
            (
                other
                for other in self.rows
                if other.pair.call.backward and other.pair.call.forward_name in names
            ),
            row,
        )

    def _is_harmless(self, row: CallRow) -> bool:
        """Return whether the sides agree without a call: one returns its input, or the call around it agrees.

        A backward without gradients of parameters is so where all parameters have their gradients on both sides.
        """
        call, golden = row.pair.call, row.pair.golden is not None
        if not (self.index.target if golden else self.index.golden).complete:
            return False
        if call.backward:
            forward = self.index.by_name[golden].get(call.forward_name)
            if forward is not None and forward.grade == UNMATCHED:
                return self._is_harmless(forward)
            sides = [cell.side for other in self.rows for cell in other.cells]
            lost = any(
                other.gaps or (other.grade == UNMATCHED and other.pair.call.gradients) for other in self.rows
            )
            within = forward is not None and self.index.outer(row) is not None
            return within and "gradient" in sides and not lost
        results = {key(value) for value in call.outputs.values()}
        if call.is_module and results <= {key(value) for value in call.inputs.values()}:
            return True
        outer = self.index.outer(row)
        if outer is not None and any(cell.side == "output" for cell in outer.cells):
            return True
        after = [other for other in self.rows[self.index.position[id(row)] :] if other.cells]
        if not call.is_module:
            return bool(after)
        inside = [other for other in after if self.index.around_row(other) is row]
        return any(results <= {key(value) for value in other.pair.call.outputs.values()} for other in inside)


def changed_selection(target: StepRecord, golden: StepRecord) -> set[str]:
    """Return the settings by which the records have other calls. A record of msProbe does not say all of them."""
    one, other = target.selection, golden.selection
    both = one.keys() & other.keys() | ((one.keys() | other.keys()) & {"construct"})
    return {name for name in both if one.get(name) != other.get(name)}


def _in_one(row: CallRow) -> str:
    return f"{row.name} is in the {'golden' if row.pair.golden else 'target'} record alone"


def _no_gradient(row: CallRow, what: Sequence[str] = ()) -> str:
    """Say which side has no gradient: the one without the call, else the one of which the differences say so."""
    given = ("True against", "against None", "in the target alone")
    in_target = any(text in words for words in what for text in given)
    if row.grade == UNMATCHED:
        in_target = row.pair.golden is None
    return f"{row.pair.call.path or 'the model'} has no gradient in the {'golden record' if in_target else 'target'}"
