"""Name the first divergence: the operation, its module and the cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from numerics.compare.causes.divergence import CallIndex, Divergence, cell_words, key, of_child
from numerics.compare.table.measure import is_overwritten
from numerics.compare.table.rows import UNMATCHED, CallRow, Cell
from numerics.compare.table.step_record import StepRecord

LIKE = 1000.0  # units of rounding, of gradients computed alike by other kernels


class Causes(CallIndex):
    """Find the cause of an unexplained error in the rows of a comparison."""

    def __init__(self, rows: Sequence[CallRow], target: StepRecord, golden: StepRecord) -> None:
        super().__init__(rows, target, golden)
        self.has_modules = any(row.pair.call.is_module for row in rows)
        self.has_functions = all(
            any(not call.is_module for call in record.calls.values()) for record in (target, golden)
        )
        parameters = [cell for row in rows for cell in row.cells if cell.side == "parameter"]
        self.all_parameters = len(parameters)
        self.unequal_parameters = sum(not cell.difference.equal for cell in parameters)
        self.many = 2 * self.unequal_parameters > self.all_parameters

    def parameters(self, row: CallRow) -> Divergence:
        what = [
            cell_words(cell) for cell in row.cells if cell.side == "parameter" and not cell.difference.equal
        ]
        why = f"{self.unequal_parameters} of {self.all_parameters} recorded parameters differ"
        if self.many:
            why += ": other weights were loaded, or a step before diverged"
        found = self.divergence(row, "parameter", [*what, *row.settings], row.units("parameter"), why)
        places = {cell.place for cell in row.cells if cell.side == "parameter" and not cell.difference.equal}
        return of_child(found, places)

    def retyped(self, row: CallRow, texts: list[str], stack: Sequence[CallRow]) -> Divergence:
        """Name the cause of an input of another dtype, where no result before has another dtype."""
        if row.pair.call.is_module:
            places = tuple(text.partition(":")[0] for text in texts)
            cells = [cell for cell in row.cells if f"{cell.side} {cell.place}" in places]
            return self.entered(row, cells, stack)
        why = "the dtype of its inputs differs"
        return self.divergence(row, "settings", [*texts, *row.settings], row.units("input"), why)

    def changed_within(self, row: CallRow) -> CallRow | None:
        """Return the first module within (or around a function) whose parameters differ."""
        module = self.module(row)
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
        self, row: CallRow, cells: Sequence[Cell], stack: Sequence[CallRow], trusted: bool = False
    ) -> Divergence:
        """Name the cause of inputs that no recorded result explains. stack: the calls around, innermost last.

        trusted: whether equal parameters are expected.
        """
        what, units = [cell_words(cell) for cell in cells], row.units("input")
        owner = self._owner(row, cells, stack)
        if owner is not None:
            return self.parameters(owner)
        if cells and all(cell.golden is not None and cell.golden.is_parameter for cell in cells):
            why = "a parameter differs: other weights were loaded, or a step before diverged"
            return self.divergence(row, "parameter", what, units, why)
        module = next((outer for outer in reversed(stack) if outer.pair.call.is_module), None)
        if trusted and module and not row.pair.call.backward and (changed := self.changed_within(module)):
            return self.parameters(changed)
        if missing := self._unmatched_before(row):
            names = ", ".join(
                f"{other.name} ({'golden' if other.pair.golden else 'target'} alone)" for other in missing[:5]
            )
            why = f"the calls differ: {names}; then the input of {row.name} differs"
            caller = self.outer(missing[0]) if self.is_repeated(missing[0]) else None
            return self.divergence(caller or missing[0], "missing", [*row.settings, *what], units, why)
        before = self._last_before(row, stack)
        if before is not None and module is None and self._is_unrecorded(row, cells):
            why = (
                f"{before.name} agrees, and no recorded call computes the gradient that {row.name} receives: the "
                "backward of what lies between, such as a custom autograd.Function, or the code there"
            )
            found = self.divergence(row, "between", what, units, why)
            return replace(found, name=f"between {before.name} and {row.name}")
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

    def _is_unrecorded(self, row: CallRow, cells: Sequence[Cell]) -> bool:
        """Return whether a function's backward receives gradients that no recorded call returned."""
        if not row.pair.call.backward or row.pair.call.is_module:
            return False
        earlier = [other.pair.golden for other in self.rows[: self.position[id(row)]] if other.pair.golden]
        results = {key(value) for call in earlier for value in call.outputs.values()}
        given = [cell.golden for cell in cells if cell.golden is not None]
        return any(value.count > 1 and key(value) not in results for value in given)

    def gradients(self, wrong: Sequence[CallRow], count: int) -> Divergence:
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
        most = count > 3 and 2 * len(wrong) > count
        dropped = [other for other in self.rows if any(gap.startswith("gradient ") for gap in other.gaps)]
        if most and dropped:
            why = f"it is on one side alone, and gradients of {len(wrong)} of {count} modules differ: clipping lacks it"
            return self.divergence(dropped[0], "missing", dropped[0].gaps, math.inf, why)
        if most and (factor := _common_factor(wrong)):
            why += f": each is {factor:.6g} times the golden one: their scale, average or clipping"
            cause = "reduction"
        elif most:
            cause, why = "reduction", f"{why}: their sum over micro-batches or devices, or their dtype"
        elif sharing := [other.pair.call.path for other in wrong if other is not row and _shared(other, row)]:
            why += f"; {', '.join(sharing)} shares it"
        return self.divergence(row, cause, [*row.settings, *what], units, why)

    def _agrees_within(self, row: CallRow) -> bool:
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

    def _alone(self) -> CallRow | None:
        """Return the first module call of one side alone."""
        return next((row for row in self.rows if row.grade == UNMATCHED and row.pair.call.is_module), None)

    def _owner(self, row: CallRow, cells: Sequence[Cell], stack: Sequence[CallRow]) -> CallRow | None:
        """Return the module whose unequal parameter is one of these inputs."""
        if row.pair.call.backward:
            return None
        keys = {key(cell.target) for cell in cells}
        owners = [
            other
            for other in self.rows
            for cell in other.cells
            if cell.side == "parameter" and not cell.difference.equal and key(cell.target) in keys
        ]
        return next((other for other in owners if other in stack), owners[0] if owners else None)

    def _last_before(self, row: CallRow, stack: Sequence[CallRow]) -> CallRow | None:
        done = [
            other
            for other in self.rows[: self.position[id(row)]]
            if other.grade != UNMATCHED
            and other not in stack
            and other.pair.call.backward == row.pair.call.backward
        ]
        return done[-1] if done else None

    def _unmatched_before(self, row: CallRow) -> list[CallRow]:
        """Return the unmatched calls of the same module between the last call that agreed and this one."""
        found: list[CallRow] = []
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

    def _module_name(self, row: CallRow) -> str | None:
        if row.pair.golden:
            return self.golden.within(row.name)
        outer = self.target.within(row.name)
        by_target = {other.pair.target.name: other.name for other in self.rows if other.pair.target}
        return by_target.get(outer, outer) if outer else None

    def _overwritten(self, row: CallRow, before: CallRow, cells: Sequence[Cell]) -> bool:
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
        results = {key(value) for pair in earlier if pair.golden for value in pair.golden.outputs.values()}
        known = {
            key(value)
            for pair in earlier
            if pair.target
            for value in (*pair.target.outputs.values(), *pair.target.inputs.values())
        }
        return bool(cells) and all(
            key(cell.golden) in results and key(cell.target) not in known for cell in cells
        )

    def _same_order(self, row: CallRow) -> bool:
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


def _shared(one: CallRow, other: CallRow) -> bool:
    """Return whether two modules have the same gradient of a parameter."""
    mine, others = (
        {key(cell.golden) for cell in row.cells if cell.side == "gradient"} for row in (one, other)
    )
    return bool(mine & others)


def _common_factor(rows: Sequence[CallRow]) -> float:
    """Return the common factor of all gradients of matrices; 0 where there is none, or one within 1 % of 1."""
    pairs = [
        (cell.target.norm or 0.0, cell.golden.norm)
        for row in rows
        for cell in row.cells
        if cell.side == "gradient"
        and cell.target
        and cell.golden
        and len(cell.golden.shape) > 1
        and cell.golden.norm
    ]
    factors = sorted(mine / other for mine, other in pairs)
    alike = (
        bool(factors) and factors[-1] - factors[0] <= LIKE * max(row.epsilon for row in rows) * factors[-1]
    )
    return factors[0] if alike and abs(factors[0] - 1) > 0.01 else 0.0


def _ratio_words(cell: Cell) -> str:
    mine, other = (value.norm if value is not None else None for value in (cell.target, cell.golden))
    return (
        f"the norm of {cell.side} {cell.place} is {mine / other:.6g} times the golden one"
        if mine and other
        else ""
    )
