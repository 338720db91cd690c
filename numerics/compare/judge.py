"""Find the first call whose result its inputs do not explain.

The calls are followed in the order of execution, with the calls within them. A relative error at a call's output is
explained if it is at most

    GROWTH x (epsilon + the largest error of its inputs, its parameters and the results of the calls within)

An error at an input is explained if it is at most GROWTH x (epsilon + the largest error of any result before).
The first one that is not explained is the first divergence. All further errors are its consequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from numerics.compare.measure import is_overwritten
from numerics.compare.records import StepRecord, Value
from numerics.compare.replay import NotReplayableError, replayed_error
from numerics.compare.rows import BEYOND, EQUAL, ROUNDING, UNMATCHED, WRONG, Cell, Row

# The largest growth measured between correct kernels was 5.7 (float32, gradients of LayerNorm), the largest error of a
# float64 replay 2.5 (float32 products of 8192 terms): tests/numerics/compare. Both bounds leave a factor of three.
GROWTH = 16.0
REPLAY = 8.0  # units of rounding


@dataclass(frozen=True)
class Divergence:
    """The first divergence. row: of the table. module: its dotted path. what: the differences, in words.

    cause: "computation", "parameter", "settings", "between" (code between the calls of a module), "overwritten",
    "data", "missing" (a call on one side alone) or "gradient" (the gradient that backward starts with).
    """

    name: str
    row: Row
    module: str
    direction: str
    cause: str
    what: list[str]
    units: float
    why: str


@dataclass
class Judgement:
    """verdict: equal, rounding or diverges. first_difference: the first row with unequal results."""

    verdict: str
    divergence: Divergence | None
    first_difference: Row | None
    findings: list[str] = field(default_factory=list)
    growths: list[tuple[float, str]] = field(default_factory=list)  # error / explained error, by row


def judge(
    rows: Sequence[Row], target: StepRecord, golden: StepRecord, envelope: Mapping[str, float] | None = None
) -> Judgement:
    """Judge the rows, and set the grade of each. envelope: the error of each golden row between two recordings."""
    scan = _Scan(rows, target, golden, envelope or {})
    for row in rows:
        if row.grade != UNMATCHED:
            scan.enter(row)
    scan.end()
    unequal = [row for row in rows if row.grade != UNMATCHED and row.unequal]
    verdict = "diverges" if scan.found else "rounding" if unequal or scan.unequal_inputs else "equal"
    limit = scan.explained_before
    for row in rows:
        if row.grade == UNMATCHED:
            continue
        if scan.found is not None and row is scan.found.row:
            row.grade = WRONG
        elif not row.unequal:
            row.grade = EQUAL
        else:
            error = max(row.error("output"), row.error("gradient"))
            row.grade = ROUNDING if error <= GROWTH * (row.epsilon + limit) else BEYOND
    return Judgement(
        verdict, scan.found, unequal[0] if unequal else None, _findings(rows, scan.found), scan.growths
    )


class _Scan:
    def __init__(
        self, rows: Sequence[Row], target: StepRecord, golden: StepRecord, envelope: Mapping[str, float]
    ) -> None:
        self.rows, self.target, self.golden, self.envelope = rows, target, golden, envelope
        self.position = {id(row): number for number, row in enumerate(rows)}
        self.forward = {row.name: row for row in rows if not row.pair.call.backward}
        self.stack: list[Row] = []
        self.seen = 0.0  # the largest explained error so far
        self.coarsest = 0.0  # the largest epsilon of unequal results so far
        self.found: Divergence | None = None
        self.growths: list[tuple[float, str]] = []
        self.unequal_inputs = False
        self.has_functions = any(not row.pair.call.is_module for row in rows)
        parameters = [cell for row in rows for cell in row.cells if cell.side == "parameter"]
        self.parameters = len(parameters)
        self.unequal_parameters = sum(not cell.difference.equal for cell in parameters)
        self.many = 2 * self.unequal_parameters > self.parameters

    @property
    def explained_before(self) -> float:
        return self.seen if math.isfinite(self.seen) else 0.0

    # -- in the order of execution

    def enter(self, row: Row) -> None:
        """Open a call: its inputs must be explained by the results before."""
        around = self._around(row)
        while self.stack and self.stack[-1].name not in around:
            self._close(self.stack.pop())
        if self.found:
            return
        error = row.error("input")
        self.unequal_inputs |= not row.equal("input")
        if error and (not row.equal("output") or not any(cell.side == "output" for cell in row.cells)):
            explained = self._rounding(row) + self.seen
            self._grown(error, explained, row)
            if error > GROWTH * explained:
                self.found = self._entered(row)
        if self.many and row.error("parameter") > GROWTH * row.epsilon and not self.found:
            self.found = self._parameters(row)
        elif self.many:
            self.seen = max(self.seen, row.error("parameter"))
        self.stack.append(row)

    def end(self) -> None:
        while self.stack:
            self._close(self.stack.pop())
        for row in self.rows:
            if not self.found and not row.equal("gradient"):
                self.found = self._gradients(row)

    def _gradients(self, row: Row) -> Divergence | None:
        """Judge the gradients of a module's parameters.

        They are complete when backward ends: a shared parameter has a part from each of its modules.
        """
        error, explained = row.error("gradient"), self._explained(row) + self.seen
        self._grown(error, explained, row)
        if error <= GROWTH * explained:
            return None
        others = [other for other in self.rows if any(cell.side == "gradient" for cell in other.cells)]
        wrong = sum(
            other.error("gradient") > GROWTH * (self._explained(other) + self.seen) for other in others
        )
        what = [
            _cell_words(cell) for cell in row.cells if cell.side == "gradient" and not cell.difference.equal
        ]
        why = (
            "every gradient that backward passes agrees, and the gradient of a parameter does not; "
            f"so in {wrong} of {len(others)} modules"
        )
        return self._divergence(row, "computation", [*row.settings, *what], row.units("gradient"), why)

    def _around(self, row: Row) -> set[str]:
        found: set[str] = set()
        outer = self.golden.within(row.name) if row.pair.golden else None
        while outer is not None and outer not in found:
            found.add(outer)
            outer = self.golden.within(outer)
        return found

    def _close(self, row: Row) -> None:
        """Close a call: its results must be explained by its inputs and by the calls within."""
        error = row.error("output")
        if not self.found:
            self.found = self._own(row, error)
        if not self.found:
            self.seen = max(self.seen, error)
            if not row.equal("output"):
                self.coarsest = max(self.coarsest, row.epsilon)
        if self.stack:
            self.stack[-1].inner = max(self.stack[-1].inner, row.inner, error)

    def _explained(self, row: Row) -> float:
        """Return the error that explains one of the call's results."""
        sources = [row.error("input"), row.error("parameter"), row.inner, self.envelope.get(row.name, 0.0)]
        forward = self.forward.get(row.pair.call.forward_name)
        if row.pair.call.backward and forward is not None:
            sources += [
                forward.error("input"),
                forward.error("parameter"),
                forward.error("output"),
                forward.inner,
            ]
        return self._rounding(row) + max(sources)

    def _rounding(self, row: Row) -> float:
        """Return the rounding that a call's input may carry.

        Statistics hide errors of single elements: an unequal input carries at least the rounding of the coarsest dtype
        before it.
        """
        if row.equal("input") and row.equal("parameter") and not row.inner and not row.pair.call.backward:
            return row.epsilon
        return max(row.epsilon, self.coarsest)

    def _own(self, row: Row, error: float) -> Divergence | None:
        if row.equal("output"):
            return None
        if not row.equal("parameter") and not self.many:
            return self._parameters(row)
        explained = self._explained(row)
        replay(row)
        if row.replayed is not None:
            wrong = max(row.replayed) > REPLAY
        else:
            self._grown(error, explained, row)
            wrong = error > GROWTH * explained
        changed = [text for text in row.settings if not text.startswith("class")]
        weak = bool(changed) and row.equal("input") and not row.pair.call.backward and not row.inner
        if not wrong and not weak:
            return None
        what = [*row.settings, *row.words("output", "parameter")]
        if not row.settings and (unknown := _integers_without_values(row)):
            why = f"only the range of {unknown} was recorded, which agrees: the data most likely differs"
            return self._divergence(row, "data", what, row.units("output"), why)
        why = (
            "its inputs agree and its result does not"
            if row.equal("input")
            else "its inputs differ by rounding, its result by more"
        )
        if row.replayed is not None and wrong:
            side = "target" if row.replayed[0] >= row.replayed[1] else "golden"
            units = f"{max(row.replayed):.3g} units of rounding"
            why = f"the {side}'s result is {units} from the golden function in float64 on its inputs"
        return self._divergence(
            row, "settings" if row.settings else "computation", what, row.units("output"), why
        )

    def _grown(self, error: float, explained: float, row: Row) -> None:
        if explained:
            self.growths.append((error / explained, row.name))

    # -- names

    def _divergence(self, row: Row, cause: str, what: list[str], units: float, why: str) -> Divergence:
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

    def _parameters(self, row: Row) -> Divergence:
        what = [
            _cell_words(cell) for cell in row.cells if cell.side == "parameter" and not cell.difference.equal
        ]
        why = f"{self.unequal_parameters} of {self.parameters} recorded parameters differ"
        if self.many:
            why += ": other weights were loaded, or a step before diverged"
        return self._divergence(row, "parameter", [*what, *row.settings], row.units("parameter"), why)

    def _entered(self, row: Row) -> Divergence:
        """Name the cause of an input that no recorded result explains."""
        cells = [
            cell
            for cell in row.cells
            if cell.side == "input" and cell.difference.error > GROWTH * (row.epsilon + self.seen)
        ]
        what, units = [_cell_words(cell) for cell in cells], row.units("input")
        owner = self._owner(row, cells)
        if owner is not None:
            return self._parameters(owner)
        module = next((outer for outer in reversed(self.stack) if outer.pair.call.is_module), None)
        if missing := self._unmatched_before(row):
            names = ", ".join(
                f"{other.name} ({'golden' if other.pair.golden else 'target'} alone)" for other in missing[:5]
            )
            why = f"the calls differ: {names}; then the input of {row.name} differs"
            return self._divergence(missing[0], "missing", [*row.settings, *what], units, why)
        before = self._last_before(row)
        if before is not None and self._overwritten(row, before, cells):
            why = f"{before.name} agrees, and its result has changed before {row.name} reads it: memory is overwritten"
            return self._divergence(row, "overwritten", what, units, why)
        if module is not None:
            inside = before is not None and module.name in self._around(before)
            after = f"after {before.name}" if before is not None and inside else "before its first call"
            why = f"its inputs agree, and {after} the input of {row.name} differs: its code between the calls"
            if not self.has_functions:
                why += ", or its memory"
            found = self._divergence(module, "between", [*module.settings, *what], units, why)
            return replace(found, name=f"{found.name} > input of {row.name}")
        if row.pair.call.backward:
            why = (
                "every forward result agrees, and the gradient that backward starts with does not: "
                "the loss, its targets or its scale"
            )
            what += [text for cell in cells if (text := _ratio_words(cell))]
            return self._divergence(row, "gradient", what, units, why)
        if any(
            value is not None and not value.floating for cell in cells for value in (cell.target, cell.golden)
        ):
            return self._divergence(
                row, "data", what, units, "the data differs: no recorded call computes this input"
            )
        return self._divergence(row, "between", what, units, "no recorded call computes this input")

    def _owner(self, row: Row, cells: Sequence[Cell]) -> Row | None:
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
        return next((other for other in owners if other in self.stack), owners[0] if owners else None)

    def _last_before(self, row: Row) -> Row | None:
        done = [
            other
            for other in self.rows[: self.position[id(row)]]
            if other.grade != UNMATCHED
            and other not in self.stack
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


def replay(row: Row) -> None:
    """Measure the results of both sides against the golden function in float64, each on its recorded inputs."""
    target, golden = row.pair.target, row.pair.golden
    if target is None or golden is None:
        return
    try:
        row.replayed = (
            replayed_error(golden, target.inputs, target.outputs),
            replayed_error(golden, golden.inputs, golden.outputs),
        )
    except NotReplayableError as reason:
        row.replayed_why = str(reason)


def _integers_without_values(row: Row) -> str:
    """Return the names of integer inputs of which only the range is known, if all inputs are integers."""
    values = [(cell.place, cell.golden) for cell in row.cells if cell.side == "input"]
    if any(value is None or value.floating or value.checksum or value.file for _, value in values):
        return ""
    return ", ".join(f"input {place}" for place, _ in values)


def _key(value: Value | None) -> Any:
    return None if value is None else (value.shape, value.statistics)


def _cell_words(cell: Cell) -> str:
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


def _findings(rows: Sequence[Row], divergence: Divergence | None) -> list[str]:
    """Return differences of settings and parameters without an effect on the verdict, and unmatched calls."""
    found = [
        f"{row.name}: {text}"
        for row in rows
        if divergence is None or row is not divergence.row
        for text in (*row.settings, *row.words("parameter"))
    ]
    alone = [row for row in rows if row.grade == UNMATCHED]
    if alone:
        names = ", ".join(row.name for row in alone[:3])
        found.append(f"{len(alone)} calls are on one side alone, the first: {names}")
    return found
