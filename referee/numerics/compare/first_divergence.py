"""Find the first difference between two records that rounding does not explain.

The calls are followed in the order of execution, with the calls within them. A relative error is explained if it is at
most GROWTH x (epsilon + the largest error of its sources):

    result  the call's inputs, its parameters, and the results of the calls within
    input   the result of the call that made it; where no recorded call did, as in backward, what the module around
            has received and what was computed in it before

Where both sides have values, a function or layer is run in float64 on the inputs of each side instead. The first error
that is not explained is the divergence. All further ones may be its consequences.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from referee.numerics.compare.compared_rows import (
    BEYOND,
    EQUAL,
    ROUNDING,
    UNMATCHED,
    WRONG,
    CallRow,
    Cell,
    Earlier,
    is_parameter,
    normalisation_scale,
    replay_row,
    wrong_updates,
)
from referee.numerics.compare.row_tree import Divergence, RowTree, key
from referee.numerics.compare.tensor_difference import compare_values
from referee.numerics.record.function_calls import SEVERAL
from referee.numerics.record.read_record import Call, StepRecord
from referee.numerics.rounding.within_rounding import BOUND
from referee.numerics.rows import TableRow

# Judge the calls and gradients that one side alone has: some change nothing, the first other one is a divergence.


IN_PLACE = re.compile(r"[^_]_$|__i[a-z]+__$")
ORDER = (2, 0)  # after every other divergence


def changed_selection(target: StepRecord, golden: StepRecord) -> set[str]:
    """Return the settings by which the records have other calls. A record of msProbe does not say all of them."""
    one, other = target.selection, golden.selection
    both = one.keys() & other.keys() | ((one.keys() | other.keys()) & {"construct"})
    return {name for name in both if one.get(name) != other.get(name)}


def first_of_one_side(tree: RowTree) -> Divergence | None:
    """Return the first call or gradient of one side alone that counts."""
    counted = [
        row
        for row in tree.rows
        if row.grade == UNMATCHED and is_judged(tree, row) and not _is_harmless(tree, row)
    ]
    gaps = [row for row in tree.rows if row.gaps]
    trained = any(row.call.backward for row in tree.rows)
    modules = [row for row in counted if row.call.is_module]
    forward = next((row for row in counted if not row.call.backward), None)
    frozen = next((row for row in tree.rows if trained and row.flags), None)
    cut = next((row for row in tree.rows if row.detached and row.call.is_module), None)
    if forward is not None:
        return tree.divergence(forward, "", "one side", order=ORDER)
    if frozen is not None:
        found = tree.divergence(tree.backward_of(frozen), "", "one side", frozen.flags[0], order=ORDER)
        path, dot, _ = frozen.flags[0].place.rpartition(".")
        inner = ".".join(filter(None, (found.module, path))) if dot else found.module
        return replace(found, module=inner, direction="backward")
    if not counted and not gaps:
        return None
    if cut is not None and (modules or gaps):
        found = tree.divergence(tree.backward_of(cut), "", "one side", cut.detached[0], order=ORDER)
        return replace(found, direction="backward")
    row = next(iter([*modules, *gaps, *counted]))
    return tree.divergence(row, "", "one side", next(iter(row.gaps), None), order=ORDER)


def is_judged(tree: RowTree, row: CallRow) -> bool:
    """Return whether both sides were recorded with the settings that record such a call."""
    changed = changed_selection(tree.target, tree.golden)
    if tree.target.by_msprobe != tree.golden.by_msprobe or changed - {"level", "construct"}:
        return False
    levels = {record.selection.get("level") for record in (tree.target, tree.golden)}
    return not changed or (row.call.is_module and "L1" not in levels)


def caller(tree: RowTree, row: CallRow) -> CallRow | None:
    """Return the module around a call of one side alone, of a module that both sides call: it differs."""
    golden, path = row.golden is not None, row.call.path
    rows = (one for one in tree.rows if one.grade != UNMATCHED and one.call.is_module)
    both = any(call.path == path for one in rows if (call := one.golden if golden else one.target))
    return tree.outer(row) if both and row.call.is_module else None


def between_passes(tree: RowTree) -> CallRow | None:
    """Return a function of one side alone that overwrites tensors before a later forward, as clipping does."""
    for row in tree.rows:
        call, record = row.call, tree.side(row.golden is not None)[0]
        if row.grade != UNMATCHED or call.is_module or call.backward or not IN_PLACE.search(call.path):
            continue
        calls = list(record.calls.values())
        later = any(one.is_module and not one.backward for one in calls[calls.index(call) :])
        if later and record.within(call.name) is None and is_judged(tree, row):
            return row
    return None


def _is_harmless(tree: RowTree, row: CallRow) -> bool:
    """Return whether the sides agree without a call: it returns its input, needs no gradient, or one around agrees.

    A backward without gradients of parameters is so where all parameters have their gradients on both sides.
    """
    call, golden = row.call, row.golden is not None
    record, rows = tree.side(golden)
    if not tree.side(not golden)[0].complete:
        return False
    if call.backward:
        forward = rows.get(call.forward_name)
        if forward is not None and forward.grade == UNMATCHED:
            return _is_harmless(tree, forward)
        sides = [cell.side for other in tree.rows for cell in other.cells]
        lost = any(other.gaps or (other.grade == UNMATCHED and other.call.gradients) for other in tree.rows)
        return forward is not None and tree.outer(row) is not None and "gradient" in sides and not lost
    floating = [value for value in call.outputs.values() if value.floating]
    if call.is_module and not call.buffers and all(value.requires_grad is False for value in floating):
        return True  # a pass under no_grad, whose results no compared call has received
    results = {key(value) for value in call.outputs.values()}
    outer = tree.outer(row)
    if outer is not None and any(cell.side == "output" for cell in outer.cells):
        return True
    if not call.is_module:
        return any(other.cells for other in tree.rows[row.position :])
    inside = [one for one in record.calls.values() if record.within(one.name) == call.name]
    return any(results <= {key(value) for value in one.outputs.values()} for one in inside)


# The largest growth measured between correct kernels was 7.5 (14 for q, k and v as three layers).
GROWTH = 16.0
FLAGS = {"True", "False", "None", "absent"}
RANDOM = "drop rand bernoulli multinomial normal uniform exponential rrelu gumbel poisson".split()  # noqa: SIM905


@dataclass(frozen=True)
class StepComparison:
    """The comparison of a step of a rank."""

    place: str  # as in "step0/rank0"; empty where a rank's folder was given
    tree: RowTree
    verdict: str  # equal, rounding or diverges
    divergence: Divergence | None
    first_unequal: CallRow | None  # the first call that ended with an unequal result
    findings: list[TableRow]  # differences without an effect on the verdict
    undecided: list[str]  # arguments whose effect rounding may hide

    @property
    def rows(self) -> Sequence[CallRow]:
        return self.tree.rows


def judge(place: str, tree: RowTree, earlier: Earlier | None = None) -> StepComparison:
    """Judge the rows, and set the grade of each. earlier: the steps before, if none diverged."""
    scan = _Judge(tree, earlier)
    found = scan.find()
    compared = [row for row in tree.rows if row.grade != UNMATCHED]
    unequal = [row for row in compared if row.unequal]
    for row in compared:
        explained = row.error("output", "gradient", "buffer") <= GROWTH * (row.epsilon + scan.largest)
        row.grade = EQUAL if not row.unequal else ROUNDING if explained and not row.gaps else BEYOND
        if found is not None and row is found.row:
            row.grade = WRONG
    found = replace(found, step=place) if found else None
    verdict = "diverges" if found else "rounding" if unequal or scan.unequal_inputs else "equal"
    first = scan.first_unequal or next(iter(unequal), None)
    findings = _findings(tree.rows, found)
    return StepComparison(place, tree, verdict, found, first, findings, scan.undecided)


class _Judge:
    def __init__(self, tree: RowTree, earlier: Earlier | None) -> None:
        self.tree, self.rows, self.earlier = tree, tree.rows, earlier
        self.records = tree.target, tree.golden
        self.has_functions = all(
            any(not call.is_module for call in record.calls.values()) for record in self.records
        )
        parameters = [cell for row in self.rows for cell in row.cells if cell.side == "parameter"]
        differ = sum(not cell.difference.equal for cell in parameters)
        self.many = 2 * differ > len(parameters)  # other weights
        self.stack: list[CallRow] = []
        self.scope: dict[str, float] = {}  # errors of a call's inputs, and of results within it so far
        self.largest = 0.0  # explained error
        self.coarsest = 0.0  # epsilon of unequal results so far
        self.undecided: list[str] = []
        self.unequal_inputs = False
        self.first_unequal: CallRow | None = None

    @property
    def trusted(self) -> bool:
        """Return whether equal parameters are expected."""
        return not (self.many or self.earlier)

    def find(self) -> Divergence | None:
        return (
            self._exception()
            or self._update()
            or self._without_order_of_passes(self._scan())
            or self._gradients()
            or self._unused()
            or first_of_one_side(self.tree)
        )

    def _without_order_of_passes(self, found: Divergence | None) -> Divergence | None:
        """Drop a difference in backward that is the order of several passes, of which one is recorded.

        All gradients of parameters agree at the end then.
        """
        rows = [row for row in self.rows if any(cell.side == "gradient" for cell in row.cells)]
        several = any(SEVERAL in record.notes for record in self.records)
        if found is None or found.direction != "backward" or not (several and rows):
            return found
        forward = max(row.error("output") for row in self.rows if not row.call.backward)
        agree = all(row.error("gradient") <= GROWTH * (row.epsilon + forward) for row in rows)
        return None if agree else found

    def _exception(self) -> Divergence | None:
        texts = [record.exception for record in self.records]
        if texts[0] == texts[1]:
            return None
        name, reason = next(text for text in texts if text)
        row = self.tree.of_target.get(name) or self.tree.of_golden.get(name)
        found = self.tree.divergence(row or self.rows[0], "", "one side", order=(-1, 0))
        sides = [text[1] if text else "" for text in texts]
        return replace(found, call=f"{name}: {reason}", target=sides[0], golden=sides[1])

    # -- in the order of execution

    def _scan(self) -> Divergence | None:
        for late in (False, True):  # what is computed of gradients, after the gradients
            for row in self.rows:
                if row.grade != UNMATCHED and row.call.late == late and (found := self._enter(row)):
                    return found
            while self.stack:
                if found := self._close(self.stack.pop()):
                    return found
        return None

    def _enter(self, row: CallRow) -> Divergence | None:
        """Open a call: its inputs must be explained by the results before."""
        around = set(self.tree.golden.around(row.name))
        while self.stack and self.stack[-1].name not in around:
            if found := self._close(self.stack.pop()):
                return found
        self.unequal_inputs |= not (row.equal("input") or _overwrites(row))
        cells = [cell for cell in row.cells if cell.side == "input" and cell.difference.error]
        if cells and not (row.equal("output") and any(cell.side == "output" for cell in row.cells)):
            rounding = self._rounding(row)
            wrong = [
                cell for cell in cells if cell.difference.error > GROWTH * (rounding + self._source(cell))
            ]
            if wrong:
                return self._entered(row, wrong)
        if not self.trusted and not self.earlier and row.error("parameter") > GROWTH * row.epsilon:
            return self._parameters(row)
        self.stack.append(row)
        self.scope[row.name] = max(row.error("input", "parameter"), self._of_forward(row))
        return None

    def _of_terms(self, row: CallRow, cell: Cell) -> float:
        """Return the error of a value relative to the terms that it is the sum of."""
        forward = self.tree.golden.calls.get(row.call.forward_name)
        if not row.call.backward or (cell.side, cell.place) != ("output", "0"):
            return cell.difference.error
        scale = normalisation_scale(row.golden, forward)
        return min(cell.difference.error, compare_values(cell.target, cell.golden, scale).error)

    def _source(self, cell: Cell) -> float:
        """Return the error that an input had where it was made."""
        scope = self.scope.get(self.stack[-1].name if self.stack else "", 0.0)
        if self.earlier and is_parameter(cell):
            return math.inf  # of an update, which is judged apart
        makers = (self.tree.maker(cell.target, False), self.tree.maker(cell.golden, True))
        known = [maker.error("output") for maker in makers if maker and maker.grade != UNMATCHED]
        return max(known) if len(known) == len(makers) else scope

    def _close(self, row: CallRow) -> Divergence | None:
        """Close a call: its results must be explained by its inputs and by the calls within."""
        error = row.error("output", "buffer")
        if self.first_unequal is None and not row.equal("output"):
            self.first_unequal = row
        if found := self._result(row, error):
            return found
        if not row.equal("output"):
            self.coarsest = max(self.coarsest, row.epsilon)
        if math.isfinite(error):
            self.largest = max(self.largest, error)
        outer = self.stack[-1].name if self.stack else ""
        self.scope[outer] = max(self.scope.get(outer, 0.0), error)
        if self.stack:
            self.stack[-1].inner = max(self.stack[-1].inner, row.inner, error)
        return None

    def _explained(self, row: CallRow) -> float:
        """Return the error that explains one of the call's results."""
        return self._rounding(row) + max(row.error("input", "parameter"), row.inner, self._of_forward(row))

    def _rounding(self, row: CallRow) -> float:
        """Return the rounding that a call's input may carry.

        Statistics hide errors of single elements: an unequal input carries at least the rounding of the coarsest dtype
        before it.
        """
        if row.equal("input", "parameter") and not row.inner and not row.call.backward:
            return row.epsilon
        return max(row.epsilon, self.coarsest)

    def _of_forward(self, row: CallRow) -> float:
        """Return the error of what a backward computes with from its forward."""
        forward = self.tree.forward(row)
        return max(forward.error("input", "parameter", "output"), forward.inner) if forward else 0.0

    def _result(self, row: CallRow, error: float) -> Divergence | None:
        if row.equal("output", "buffer"):
            return None
        if not row.equal("parameter") and self.trusted:
            return self._parameters(row)
        explained = self._explained(row)
        if _is_random(row) and error > GROWTH * explained:
            return self.tree.divergence(row, "output", "data", bound=GROWTH)
        replay_row(row, self.tree.forward(row), not self.has_functions)
        wrong = row.replayed is not None and max(row.replayed) > BOUND
        if row.replayed is None or row.call.backward or not row.equal("buffer"):
            cells = [cell for cell in row.cells if cell.side in ("output", "buffer")]
            if error > GROWTH * explained:
                error = max(self._of_terms(row, cell) for cell in cells)
            wrong = error > GROWTH * explained and (wrong or row.replayed is None or not row.equal("buffer"))
        changed = [value for value in row.settings if value.place != "class"]
        if row.call.late and row.replayed is None and not row.equal("input") and not changed:
            # As of an update: see wrong_updates.
            wrong = wrong and _is_large_update(row, math.sqrt(GROWTH * explained))
        # A number that differs is a setting even where its effect is small. A flag may choose another kernel.
        exact = row.equal("input") and not row.call.backward and not row.inner
        numbers = [value for value in changed if not {value.target, value.golden} & FLAGS]
        if not wrong and not (exact and any(value.side != "output" for value in numbers)):
            if row.replayed is None and not (row.equal("input") or row.call.is_module):
                self.undecided += [
                    f"{row.name}: {value.text}" for value in changed if value.side == "argument"
                ]
            return None
        if not row.settings and row.replayed is None and _integers_without_values(row):
            return self.tree.divergence(row, "output", "data")
        bound = GROWTH * explained / row.epsilon if row.epsilon else 0.0
        bound = bound if row.replayed is None else BOUND
        if row.settings:
            return self.tree.divergence(row, "output", "setting", (changed or row.settings)[0], bound)
        inside = (other for other in self.rows if other.grade == UNMATCHED and other.call.is_module)
        judged = (one for one in inside if self.tree.outer(one) is row and is_judged(self.tree, one))
        alone = next((one for one in judged if one.call.backward == row.call.backward), None)
        if alone is not None and not caller(self.tree, alone):
            return self.tree.divergence(alone, "", "one side")
        return self.tree.divergence(row, "output", "computed", bound=bound)

    # -- what the first divergence is

    def _parameters(self, row: CallRow) -> Divergence:
        found = self.tree.divergence(row, "parameter", "parameter", bound=0.0)
        path, dot, _ = found.place.rpartition(".")  # of a module within that is not called
        return replace(found, module=".".join(filter(None, (found.module, path)))) if dot else found

    def _entered(self, row: CallRow, cells: Sequence[Cell]) -> Divergence:
        """Name the cause of inputs that no recorded result explains."""
        cell = max(cells, key=lambda cell: cell.difference.error)
        makers = (self.tree.maker(cell.golden, True), self.tree.maker(cell.target, False))
        for maker in makers:
            if maker is not None and maker.grade == UNMATCHED and is_judged(self.tree, maker):
                return self.tree.divergence(caller(self.tree, maker) or maker, "", "one side")
        module = next((outer for outer in reversed(self.stack) if outer.call.is_module), None)
        from_outside = not any(value.maker for value in (cell.golden, cell.target) if value)
        evidence = "data" if module is None and from_outside else "changed"
        found = self.tree.divergence(row, "input", evidence, cell, GROWTH)
        if module is None:
            return found
        return replace(found, call=f"{module.name} > input of {row.name}", module=module.call.path)

    def _gradients(self) -> Divergence | None:
        """Judge the gradients of the modules' parameters.

        They are complete when backward ends: a shared parameter has a part from each of its modules.
        """
        rows = [row for row in self.rows if any(cell.side == "gradient" for cell in row.cells)]
        wrong = [
            row
            for row in rows
            if row.error("gradient") > GROWTH * max(self._explained(row), row.error("input", "output"))
        ]
        if not wrong:
            return None
        order = (1, wrong[0].position)
        if between := between_passes(self.tree):
            return self.tree.divergence(between, "", "one side", order=order)
        changed = len(rows) > 3 and 2 * len(wrong) > len(rows)  # averaged, clipped, rounded or scaled
        found = self.tree.divergence(
            wrong[0], "gradient", "update" if changed else "computed", None, GROWTH, order
        )
        count = [f"{len(wrong)} of {len(rows)} modules"] if changed else []
        return replace(found, context=(*found.context, *count))

    def _unused(self) -> Divergence | None:
        """Name a parameter that differs without an effect on this step."""
        changed = next((row for row in self.rows if not row.equal("parameter")), None)
        return self._parameters(changed) if changed and self.trusted else None

    def _update(self) -> Divergence | None:
        wrong = wrong_updates(self.rows, self.earlier, GROWTH) if self.earlier else None
        if wrong is None:
            return None
        row, cell, evidence, context = wrong
        found = self.tree.divergence(row, cell.side, evidence, cell, order=(-1, 0))
        return replace(found, context=(context,) if context else ())


def _is_random(row: CallRow) -> bool:
    """Return whether a function draws random numbers. A dropout does only in training mode."""
    call: Call = row.call
    name = call.path.rpartition(".")[2]
    if call.is_module or call.backward or not any(word in name for word in RANDOM):
        return False
    return "drop" not in name or any(value.plain is True for value in call.inputs.values())


def _integers_without_values(row: CallRow) -> bool:
    """Return whether all inputs are integers of which only the range is known."""
    values = [cell.golden for cell in row.cells if cell.side == "input"]
    return not any(value is None or value.floating or value.checksum or value.file for value in values)


def _findings(rows: Sequence[CallRow], found: Divergence | None) -> list[TableRow]:
    """Return differences of settings and parameters without an effect on the verdict."""
    others = [row for row in rows if found is None or row is not found.row]
    plain = [value for row in others for value in (*row.settings, *row.flags, *row.lost)]
    parameters = [
        TableRow(row.name, cell.side, cell.place, units=row.units("parameter"), evidence="parameter")
        for row in others
        for cell in row.cells
        if cell.side == "parameter" and not cell.difference.equal
    ]
    return plain + parameters


def _overwrites(row: CallRow) -> bool:
    """Return whether a function wrote over all of its first argument that differs: memory that nothing had set."""
    places = {cell.place for cell in row.cells if cell.side == "input" and not cell.difference.equal}
    is_function = not (row.call.is_module or row.call.backward)
    return is_function and row.call.path[-1:] == "_" and places == {"0"} and row.equal("output")


def _is_large_update(row: CallRow, bound: float) -> bool:
    """Return whether a parameter that a function overwrote differs by more than the bound; a bias is not judged."""
    cells = [cell for cell in row.cells if cell.side == "output"]
    matrices = [cell for cell in cells if cell.golden is not None and len(cell.golden.shape) > 1]
    return row.call.writes_parameter and any(cell.difference.error > bound for cell in matrices)
