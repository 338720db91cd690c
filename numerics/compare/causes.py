"""Name the first divergence: the operation, its module and the cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from numerics.compare.measure import is_overwritten
from numerics.compare.records import StepRecord, Value
from numerics.compare.rows import UNMATCHED, Cell, Row

LIKE = 1000.0  # units of rounding, of gradients computed alike by other kernels


@dataclass(frozen=True)
class Divergence:
    """The first divergence. row: of the table. module: its dotted path. what: the differences, in words.

    cause: "computation", "parameter", "settings", "between" (code between the calls of a module), "overwritten",
    "data", "missing" (a call on one side alone), "gradient" (the gradient that backward starts with), "reduction" (of
    the parameters' gradients) or "optimizer".
    """

    name: str
    row: Row
    module: str
    direction: str
    cause: str
    what: list[str]
    units: float
    why: str


class Causes:
    """The rows of a comparison, and what they say about the cause of an error that is not explained."""

    def __init__(self, rows: Sequence[Row], target: StepRecord, golden: StepRecord) -> None:
        self.rows, self.target, self.golden = rows, target, golden
        self.position = {id(row): number for number, row in enumerate(rows)}
        self._by_name = {
            golden: {
                call.name: row for row in rows if (call := row.pair.golden if golden else row.pair.target)
            }
            for golden in (False, True)
        }
        self.has_functions = all(
            any(not call.is_module for call in record.calls.values()) for record in (target, golden)
        )
        parameters = [cell for row in rows for cell in row.cells if cell.side == "parameter"]
        self.all_parameters = len(parameters)
        self.unequal_parameters = sum(not cell.difference.equal for cell in parameters)
        self.many = 2 * self.unequal_parameters > self.all_parameters

    def around(self, row: Row) -> set[str]:
        """Return the names of the golden calls around a call."""
        found: set[str] = set()
        outer = self.golden.within(row.name) if row.pair.golden else None
        while outer is not None and outer not in found:
            found.add(outer)
            outer = self.golden.within(outer)
        return found

    def divergence(self, row: Row, cause: str, what: list[str], units: float, why: str) -> Divergence:
        module = self._module(row)
        name, call = row.name, row.pair.call
        if not call.is_module and module is not None:
            name = f"{module.name} > {name}"
        path = module.pair.call.path if module is not None else ""
        return Divergence(
            name, row, path, "backward" if call.backward else "forward", cause, what, units, why
        )

    def _module(self, row: Row) -> Row | None:
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

    def parameters(self, row: Row) -> Divergence:
        what = [
            cell_words(cell) for cell in row.cells if cell.side == "parameter" and not cell.difference.equal
        ]
        why = f"{self.unequal_parameters} of {self.all_parameters} recorded parameters differ"
        if self.many:
            why += ": other weights were loaded, or a step before diverged"
        found = self.divergence(row, "parameter", [*what, *row.settings], row.units("parameter"), why)
        places = {cell.place for cell in row.cells if cell.side == "parameter" and not cell.difference.equal}
        return _of_child(found, places)

    def retyped(self, row: Row, texts: list[str], stack: Sequence[Row]) -> Divergence:
        """Name the cause of an input of another dtype, where no result before has another dtype."""
        if row.pair.call.is_module:
            places = tuple(text.partition(":")[0] for text in texts)
            cells = [cell for cell in row.cells if f"{cell.side} {cell.place}" in places]
            return self.entered(row, cells, stack)
        why = "the dtype of its inputs differs"
        return self.divergence(row, "settings", [*texts, *row.settings], row.units("input"), why)

    def changed_within(self, row: Row) -> Row | None:
        """Return the first module within (or around a function) whose parameters differ."""
        module = self._module(row)
        if module is None or module.pair.call.backward:
            return None
        path = module.pair.call.path
        return next(
            (
                other
                for other in self.rows
                if not other.equal("parameter")
                and (not path or f"{other.pair.call.path}.".startswith(f"{path}."))
            ),
            None,
        )

    def entered(
        self, row: Row, cells: Sequence[Cell], stack: Sequence[Row], trusted: bool = False
    ) -> Divergence:
        """Name the cause of inputs that no recorded result explains. stack: the calls around, innermost last.

        trusted: whether equal parameters are expected.
        """
        what, units = [cell_words(cell) for cell in cells], row.units("input")
        owner = self._owner(row, cells, stack)
        if owner is not None:
            return self.parameters(owner)
        module = next((outer for outer in reversed(stack) if outer.pair.call.is_module), None)
        if trusted and module and not row.pair.call.backward and (changed := self.changed_within(module)):
            return self.parameters(changed)
        if missing := self._unmatched_before(row):
            names = ", ".join(
                f"{other.name} ({'golden' if other.pair.golden else 'target'} alone)" for other in missing[:5]
            )
            why = f"the calls differ: {names}; then the input of {row.name} differs"
            return self.divergence(missing[0], "missing", [*row.settings, *what], units, why)
        before = self._last_before(row, stack)
        if before is not None and self._overwritten(row, before, cells):
            why = f"{before.name} agrees, and its result has changed before {row.name} reads it: memory is overwritten"
            return self.divergence(row, "overwritten", what, units, why)
        if module is not None:
            inside = before is not None and module.name in self.around(before)
            after = f"after {before.name}" if before is not None and inside else "before its first call"
            why = f"its inputs agree, and {after} the input of {row.name} differs: its code between the calls"
            if not self.has_functions:
                why += ", or its memory"
            found = self.divergence(module, "between", [*module.settings, *what], units, why)
            return replace(found, name=f"{found.name} > input of {row.name}")
        if row.pair.call.backward:
            why = (
                "every forward result agrees, and the gradient that backward starts with does not: "
                "the loss, its targets or its scale"
            )
            what += [text for cell in cells if (text := _ratio_words(cell))]
            return self.divergence(row, "gradient", what, units, why)
        if any(
            value is not None and not value.floating for cell in cells for value in (cell.target, cell.golden)
        ):
            return self.divergence(
                row, "data", what, units, "the data differs: no recorded call computes this input"
            )
        return self.divergence(row, "between", what, units, "no recorded call computes this input")

    # -- calls and gradients of one side alone

    def is_judged(self, row: Row) -> bool:
        """Return whether both sides were recorded with the settings that record such a call."""
        changed = changed_selection(self.target, self.golden)
        if self.target.by_msprobe != self.golden.by_msprobe or changed - {"level", "construct"}:
            return False
        levels = {record.selection.get("level") for record in (self.target, self.golden)}
        return not changed or (row.pair.call.is_module and "L1" not in levels)

    def alone_within(self, row: Row) -> Row | None:
        """Return the first module call of one side alone within a call."""
        return next(
            (
                other
                for other in self.rows
                if other.grade == UNMATCHED
                and other.pair.call.is_module
                and other.pair.call.backward == row.pair.call.backward
                and self._outer(other) is row
                and self.is_judged(other)
            ),
            None,
        )

    def dropped(self, row: Row, alone: Row) -> Divergence:
        """Name the call of one side alone that explains a wrong result around it."""
        what = [*row.settings, *row.words("output")]
        if row.pair.call.backward:
            why = f"{_no_gradient(alone)}, and the gradient that {row.name} returns differs"
            return self.divergence(row, "missing", what, row.units("output"), why)
        why = f"{_in_one(alone)}, and the result of {row.name} differs"
        return self.divergence(alone, "missing", what, row.units("output"), why)

    def missing(self) -> Divergence | None:
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
            return _of_child(found, {text.split(":")[0].split(" ")[1] for text in frozen.flags})
        if not counted and not gaps:
            return None
        modules = [row for row in counted if row.pair.call.is_module]
        cut = next((row for row in self.rows if row.detached and row.pair.call.is_module), None)
        if cut is not None and (modules or gaps):
            return self._one_side(self._backward_of(cut), cut.detached)
        row = next(iter([*modules, *gaps, *counted]))
        return self._one_side(row, row.gaps)

    def _one_side(self, row: Row, what: list[str]) -> Divergence:
        others = [other.name for other in self.rows if other.grade == UNMATCHED and other.pair.call.is_module]
        why = _no_gradient(row, what) if row.pair.call.backward or what else _in_one(row)
        lacking = self.target if row.pair.golden and not row.pair.target else self.golden
        if row.grade == UNMATCHED and not lacking.complete:
            why += "; that record is not complete"
        if others:
            what = [*what, f"{len(others)} calls of modules are on one side alone: {', '.join(others[:5])}"]
        found = self.divergence(row, "missing", what, math.inf, why)
        return replace(
            found, direction="backward" if row.pair.call.backward or row.flags or row.detached else "forward"
        )

    def _backward_of(self, row: Row) -> Row:
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

    def _outer(self, row: Row) -> Row | None:
        """Return the row of the innermost matched module around a call."""
        found = self._around_row(row)
        while found is not None and (found.grade == UNMATCHED or not found.pair.call.is_module):
            found = self._around_row(found)
        return found

    def _around_row(self, row: Row) -> Row | None:
        golden = row.pair.golden is not None
        outer = (self.golden if golden else self.target).within(row.name)
        return self._by_name[golden].get(outer) if outer else None

    def _is_harmless(self, row: Row) -> bool:
        """Return whether the sides agree without a call: one returns its input, or the call around it agrees.

        A backward without gradients of parameters is so where all parameters have their gradients on both sides.
        """
        call, golden = row.pair.call, row.pair.golden is not None
        if not (self.target if golden else self.golden).complete:
            return False
        if call.backward:
            forward = self._by_name[golden].get(call.forward_name)
            if forward is not None and forward.grade == UNMATCHED:
                return self._is_harmless(forward)
            sides = [cell.side for other in self.rows for cell in other.cells]
            lost = any(
                other.gaps or (other.grade == UNMATCHED and other.pair.call.gradients) for other in self.rows
            )
            within = forward is not None and self._outer(row) is not None
            return within and "gradient" in sides and not lost
        results = {_key(value) for value in call.outputs.values()}
        if call.is_module and results <= {_key(value) for value in call.inputs.values()}:
            return True
        outer = self._outer(row)
        if outer is not None and any(cell.side == "output" for cell in outer.cells):
            return True
        after = [other for other in self.rows[self.position[id(row)] :] if other.cells]
        if not call.is_module:
            return bool(after)
        inside = [other for other in after if self._around_row(other) is row]
        return any(results <= {_key(value) for value in other.pair.call.outputs.values()} for other in inside)

    def gradients(self, wrong: Sequence[Row], count: int) -> Divergence:
        """Name the cause of gradients of parameters that no gradient in backward explains. count: of all rows."""
        row = next((other for other in wrong if not self._agrees_within(other)), wrong[0])
        what = [
            cell_words(cell) for cell in row.cells if cell.side == "gradient" and not cell.difference.equal
        ]
        units, cause = row.units("gradient"), "computation"
        why = (
            "every gradient that backward passes agrees, and the gradient of a parameter does not; "
            f"so in {len(wrong)} of {count} modules"
        )
        if 2 * len(wrong) > count and (alone := self._alone()):
            side = "golden" if alone.pair.golden else "target"
            why = f"{alone.name} is in the {side} record alone, and gradients of parameters differ: a call was dropped"
            return self.divergence(alone, "missing", what, units, why)
        if count > 3 and 2 * len(wrong) > count:
            cause, why = "reduction", f"{why}: their sum over micro-batches or devices, or their dtype"
        elif sharing := [other.pair.call.path for other in wrong if other is not row and _shared(other, row)]:
            why += f"; {', '.join(sharing)} shares it"
        return self.divergence(row, cause, [*row.settings, *what], units, why)

    def _agrees_within(self, row: Row) -> bool:
        """Return whether the calls within computed each unequal gradient alike: its error is from elsewhere."""
        wrong = {cell.golden.shape for cell in row.cells if cell.side == "gradient" and cell.golden}
        inside = [
            cell
            for other in self.rows
            if row.name in self.around(other)
            for cell in other.cells
            if cell.side == "output" and cell.golden is not None and cell.golden.shape in wrong
        ]
        return bool(inside) and all(cell.difference.error <= LIKE * row.epsilon for cell in inside)

    def _alone(self) -> Row | None:
        """Return the first module call of one side alone."""
        return next((row for row in self.rows if row.grade == UNMATCHED and row.pair.call.is_module), None)

    def _owner(self, row: Row, cells: Sequence[Cell], stack: Sequence[Row]) -> Row | None:
        """Return the module whose unequal parameter is one of these inputs."""
        if row.pair.call.backward:
            return None
        keys = {_key(cell.target) for cell in cells}
        owners = [
            other
            for other in self.rows
            for cell in other.cells
            if cell.side == "parameter" and not cell.difference.equal and _key(cell.target) in keys
        ]
        return next((other for other in owners if other in stack), owners[0] if owners else None)

    def _last_before(self, row: Row, stack: Sequence[Row]) -> Row | None:
        done = [
            other
            for other in self.rows[: self.position[id(row)]]
            if other.grade != UNMATCHED
            and other not in stack
            and other.pair.call.backward == row.pair.call.backward
        ]
        return done[-1] if done else None

    def _unmatched_before(self, row: Row) -> list[Row]:
        """Return the unmatched calls of the same module between the last call that agreed and this one."""
        found: list[Row] = []
        place = self._module_name(row)
        for other in reversed(self.rows[: self.position[id(row)]]):
            if other.pair.call.backward != row.pair.call.backward:
                break
            if self._module_name(other) != place:
                continue
            if not self.has_functions and not other.pair.call.is_module:
                continue  # functions of one side alone were recorded
            if other.grade != UNMATCHED:
                if not found:
                    continue
                break
            found.append(other)
        return [other for other in reversed(found) if other.pair.golden] + [
            other for other in reversed(found) if not other.pair.golden
        ]

    def _module_name(self, row: Row) -> str | None:
        if row.pair.golden:
            return self.golden.within(row.name)
        outer = self.target.within(row.name)
        by_target = {other.pair.target.name: other.name for other in self.rows if other.pair.target}
        return by_target.get(outer, outer) if outer else None

    def _overwritten(self, row: Row, before: Row, cells: Sequence[Cell]) -> bool:
        """Return whether the target's memory changed between two calls.

        So it is where a run of elements differs and all others are equal. Without recorded values: where the golden
        input is an earlier result, the target's is none, and all functions between are recorded and are the same.
        """
        runs = [is_overwritten(cell.target, cell.golden) for cell in cells]
        if any(run is not None for run in runs):
            return all(runs)
        if not self.has_functions or not self._same_order(row):
            return False
        earlier = [other.pair for other in self.rows[: self.position[id(row)]]]
        results = {_key(value) for pair in earlier if pair.golden for value in pair.golden.outputs.values()}
        known = {
            _key(value)
            for pair in earlier
            if pair.target
            for value in (*pair.target.outputs.values(), *pair.target.inputs.values())
        }
        return bool(cells) and all(
            _key(cell.golden) in results and _key(cell.target) not in known for cell in cells
        )

    def _same_order(self, row: Row) -> bool:
        """Return whether both sides have the same call before this one."""
        target, golden = row.pair.target, row.pair.golden
        if target is None or golden is None:
            return False
        mine, others = list(self.target.calls), list(self.golden.calls)
        here, there = mine.index(target.name), others.index(golden.name)
        if not here or not there:
            return False
        before = (mine[here - 1], others[there - 1])
        return any(
            (pair.target.name, pair.golden.name) == before
            for pair in (other.pair for other in self.rows)
            if pair.target and pair.golden
        )


def _of_child(found: Divergence, places: set[str]) -> Divergence:
    """Name the module within that has the parameters: it is not called, so the outer call has them."""
    children = {place.rpartition(".")[0] for place in places}
    child = children.pop() if len(children) == 1 else ""
    return replace(found, module=".".join(filter(None, (found.module, child))))


def changed_selection(target: StepRecord, golden: StepRecord) -> set[str]:
    """Return the settings by which the records have other calls. An older record does not say all of them."""
    one, other = target.selection, golden.selection
    both = one.keys() & other.keys() | ((one.keys() | other.keys()) & {"construct"})
    return {name for name in both if one.get(name) != other.get(name)}


def _in_one(row: Row) -> str:
    return f"{row.name} is in the {'golden' if row.pair.golden else 'target'} record alone"


def _no_gradient(row: Row, what: Sequence[str] = ()) -> str:
    """Say which side has no gradient: the one without the call, else the one of which the differences say so."""
    given = ("True against", "against None", "in the target alone")
    in_target = any(text in words for words in what for text in given)
    if row.grade == UNMATCHED:
        in_target = row.pair.golden is None
    return f"{row.pair.call.path or 'the model'} has no gradient in the {'golden record' if in_target else 'target'}"


def _shared(one: Row, other: Row) -> bool:
    """Return whether two modules have the same gradient of a parameter."""
    mine, others = (
        {_key(cell.golden) for cell in row.cells if cell.side == "gradient"} for row in (one, other)
    )
    return bool(mine & others)


def _key(value: Value | None) -> Any:
    return None if value is None else (value.shape, value.statistics)


def cell_words(cell: Cell) -> str:
    if cell.difference.what:
        return f"{cell.side} {cell.place}: {cell.difference.what}"
    here, there = (value.describe() if value else "absent" for value in (cell.target, cell.golden))
    return f"{cell.side} {cell.place}: {here} against {there}"


def _ratio_words(cell: Cell) -> str:
    mine, other = (value.norm if value is not None else None for value in (cell.target, cell.golden))
    return (
        f"the norm of {cell.side} {cell.place} is {mine / other:.6g} times the golden one"
        if mine and other
        else ""
    )


# -- the optimizer, between two steps
