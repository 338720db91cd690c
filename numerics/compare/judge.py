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
from dataclasses import dataclass, field

from numerics.compare.causes.causes import Causes
from numerics.compare.causes.divergence import Divergence, cell_words
from numerics.compare.causes.missing import Missing
from numerics.compare.replay import NotReplayableError, replayed_error
from numerics.compare.table.measure import compare_values, epsilon, load, load_pair
from numerics.compare.table.rows import BEYOND, EQUAL, ROUNDING, UNMATCHED, WRONG, Cell, Row
from numerics.compare.table.step_record import StepRecord, Value

# The largest growth measured between correct kernels was 7.5 (14 for q, k and v as three layers), the largest error of
# a float64 replay 2.5 (float32 products of 8192 terms): tests/numerics/compare.
GROWTH = 16.0
REPLAY = 8.0  # units of rounding


@dataclass
class Judgement:
    """verdict: equal, rounding or diverges. first_difference: the first call that ended with an unequal result."""

    verdict: str
    divergence: Divergence | None
    first_difference: Row | None
    findings: list[str] = field(default_factory=list)
    growths: list[tuple[float, str]] = field(default_factory=list)  # error / explained error, by row


def judge(
    rows: Sequence[Row],
    target: StepRecord,
    golden: StepRecord,
    envelope: Mapping[str, float] | None = None,
    earlier: Earlier | None = None,
) -> Judgement:
    """Judge the rows, and set the grade of each.

    envelope: the error of each golden row between two recordings. earlier: the steps before, if none diverged.
    """
    scan = _Scan(rows, target, golden, envelope or {})
    if earlier is not None:
        scan.updated = True
        scan.found = judge_updates(rows, earlier, GROWTH, scan.causes)
    for row in rows:
        if row.grade != UNMATCHED:
            scan.enter(row)
    scan.end()
    alone = any(row.grade == UNMATCHED and scan.missing.is_judged(row) for row in rows)
    unequal = [row for row in rows if row.grade != UNMATCHED and row.unequal]
    verdict = "diverges" if scan.found else "rounding" if unequal or scan.unequal_inputs or alone else "equal"
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
            explained = error <= GROWTH * (row.epsilon + limit) and not row.gaps
            row.grade = ROUNDING if explained else BEYOND
    first = scan.first_unequal or next(iter(unequal), None)
    return Judgement(verdict, scan.found, first, _findings(rows, scan.found), scan.growths)


class _Scan:
    def __init__(
        self, rows: Sequence[Row], target: StepRecord, golden: StepRecord, envelope: Mapping[str, float]
    ) -> None:
        self.rows, self.envelope = rows, envelope
        self.causes = Causes(rows, target, golden)
        self.missing = Missing(self.causes)
        self.forward = {row.name: row for row in rows if not row.pair.call.backward}
        self.stack: list[Row] = []
        self.seen = 0.0  # the largest explained error so far
        self.coarsest = 0.0  # the largest epsilon of unequal results so far
        self.found: Divergence | None = None
        self.growths: list[tuple[float, str]] = []
        self.unequal_inputs = False
        self.first_unequal: Row | None = None  # the first call that ended with an unequal result
        self.updated = False  # by an optimizer's step, which explains the parameters' errors

    @property
    def explained_before(self) -> float:
        return self.seen if math.isfinite(self.seen) else 0.0

    # -- in the order of execution

    def enter(self, row: Row) -> None:
        """Open a call: its inputs must be explained by the results before."""
        around = self.causes.around(row)
        while self.stack and self.stack[-1].name not in around:
            self._close(self.stack.pop())
        if self.found:
            return
        if texts := row.retyped.get("input"):
            self.found = self.causes.retyped(row, texts, self.stack)
            return
        error = row.error("input")
        self.unequal_inputs |= not row.equal("input")
        if error and (not row.equal("output") or not any(cell.side == "output" for cell in row.cells)):
            explained = self._rounding(row) + self.seen
            self._grown(error, explained, row)
            if error > GROWTH * explained:
                wrong = [
                    cell
                    for cell in row.cells
                    if cell.side == "input" and cell.difference.error > GROWTH * (row.epsilon + self.seen)
                ]
                trusted = not (self.causes.many or self.updated)
                self.found = self.causes.entered(row, wrong, self.stack, trusted)
        if self.found:
            return
        if self.updated or self.causes.many:
            if not self.updated and row.error("parameter") > GROWTH * row.epsilon:
                self.found = self.causes.parameters(row)
            self.seen = max(self.seen, row.error("parameter"))
        self.stack.append(row)

    def end(self) -> None:
        while self.stack:
            self._close(self.stack.pop())
        if not self.found:
            self.found = self._gradients()
        if not (self.found or self.updated or self.causes.many):
            changed = next((row for row in self.rows if not row.equal("parameter")), None)
            self.found = self.causes.parameters(changed) if changed else None  # unused in this step
        if not self.found:
            self.found = self.missing.first()

    def _gradients(self) -> Divergence | None:
        """Judge the gradients of the modules' parameters.

        They are complete when backward ends: a shared parameter has a part from each of its modules.
        """
        wrong, others = [], [row for row in self.rows if any(cell.side == "gradient" for cell in row.cells)]
        for row in others:
            error, explained = row.error("gradient"), self._explained(row) + self.seen
            self._grown(error, explained, row)
            if error > GROWTH * explained:
                wrong.append(row)
        return self.causes.gradients(wrong, len(others)) if wrong else None

    def _close(self, row: Row) -> None:
        """Close a call: its results must be explained by its inputs and by the calls within."""
        error = row.error("output")
        if self.first_unequal is None and not row.equal("output"):
            self.first_unequal = row
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
        trusted = not (self.causes.many or self.updated)  # equal parameters are expected
        if not row.equal("parameter") and trusted:
            return self.causes.parameters(row)
        if texts := row.retyped.get("output"):
            return self.causes.divergence(
                row,
                "settings",
                [*texts, *row.settings],
                row.units("output"),
                "the dtype of its result differs",
            )
        explained = self._explained(row)
        replay(row, not self.causes.has_functions)
        if row.replayed is not None:
            wrong = max(row.replayed) > REPLAY
        else:
            self._grown(error, explained, row)
            wrong = error > GROWTH * explained
        changed = [text for text in row.settings if not text.startswith("class")]
        weak = bool(changed) and row.equal("input") and not row.pair.call.backward and not row.inner
        if not wrong and not weak:
            return None
        if trusted and wrong and (changed_row := self.causes.changed_within(row)):
            return self.causes.parameters(changed_row)
        if wrong and (extra := self.missing.alone_within(row)):
            return self.missing.dropped(row, extra)
        what = [*row.settings, *row.words("output", "parameter")]
        if not row.settings and (unknown := _integers_without_values(row)):
            why = f"only the range of {unknown} was recorded, which agrees: the data most likely differs"
            return self.causes.divergence(row, "data", what, row.units("output"), why)
        why = (
            "its inputs agree and its result does not"
            if row.equal("input")
            else "its inputs differ by rounding, its result by more"
        )
        if row.replayed is not None and wrong:
            side = "target" if row.replayed[0] >= row.replayed[1] else "golden"
            units = f"{max(row.replayed):.3g} units of rounding"
            why = f"the {side}'s result is {units} from the golden function in float64 on its inputs"
        return self.causes.divergence(
            row, "settings" if row.settings else "computation", what, row.units("output"), why
        )

    def _grown(self, error: float, explained: float, row: Row) -> None:
        if explained:
            self.growths.append((error / explained, row.name))


def replay(row: Row, layers: bool) -> None:
    """Measure the results of both sides against the golden call in float64, each on its recorded inputs.

    layers: whether calls of modules are replayed. A layer whose golden result is far from that of torch's class has a
    hook or another forward: it is not replayed.
    """
    target, golden = row.pair.target, row.pair.golden
    if target is None or golden is None:
        return
    try:
        if golden.is_module and not layers:
            raise NotReplayableError("the functions within are replayed")
        right = replayed_error(golden, golden.inputs, golden.outputs, golden.parameters)
        if golden.is_module and right > REPLAY:
            raise NotReplayableError("the golden result is not that of torch's class")
        row.replayed = replayed_error(golden, target.inputs, target.outputs, target.parameters), right
    except NotReplayableError as reason:
        row.replayed_why = str(reason)


def _integers_without_values(row: Row) -> str:
    """Return the names of integer inputs of which only the range is known, if all inputs are integers."""
    values = [(cell.place, cell.golden) for cell in row.cells if cell.side == "input"]
    if any(value is None or value.floating or value.checksum or value.file for _, value in values):
        return ""
    return ", ".join(f"input {place}" for place, _ in values)


def _findings(rows: Sequence[Row], divergence: Divergence | None) -> list[str]:
    """Return differences of settings and parameters without an effect on the verdict, and unmatched calls."""
    found = [
        f"{row.name}: {text}"
        for row in rows
        if divergence is None or row is not divergence.row
        for text in (*row.settings, *row.flags, *row.words("parameter"))
    ]
    alone = [row for row in rows if row.grade == UNMATCHED]
    if alone:
        names = ", ".join(list(dict.fromkeys(row.name for row in alone))[:3])
        found.append(f"{len(alone)} calls are on one side alone, the first: {names}")
    return found


@dataclass(frozen=True)
class Earlier:
    """The steps before. rows: of the last one. place: as in "step0/rank0". error: the largest of their gradients.

    equal: whether all of their results are equal.
    """

    rows: Sequence[Row]
    place: str
    error: float
    equal: bool


def judge_updates(rows: Sequence[Row], earlier: Earlier, growth: float, causes: Causes) -> Divergence | None:
    """Return the first parameter whose update since the step before its gradient does not explain.

    The error of an update is relative to the update: |d - d'| / |d'|, with d the change of a parameter. Where every
    gradient before was equal, updates may differ by rounding. Where gradients have the relative error e, Adam divides
    elements of the size of e by themselves: a share e of the elements has an update of any sign, which is an error of
    sqrt(e) of the update. An update is wrong above sqrt(growth x e). Biases are then not judged: the gradient of a
    key's bias is zero but for rounding.
    """
    before = {
        (row.name, cell.place): cell for row in earlier.rows for cell in row.cells if _is_parameter(cell)
    }
    trained = {
        (row.pair.call.path, cell.place): compare_values(cell.target, cell.golden).error
        for row in earlier.rows
        for cell in row.cells
        if cell.side == "gradient"
    }
    updates = [
        (row, cell, old)
        for row in rows
        for cell in row.cells
        if _is_parameter(cell)
        and (row.pair.call.path, cell.place) in trained
        and (old := before.get((row.name, cell.place))) is not None
    ]
    wrong = []
    for row, cell, old in updates:
        error = max(earlier.error, trained[row.pair.call.path, cell.place])
        bound = growth * row.epsilon if earlier.equal else math.sqrt(growth * error)
        is_noise = _update_error(cell, old) <= bound or (not earlier.equal and _group(row, cell) == "biases")
        if not (cell.difference.equal or is_noise):
            wrong.append((row, cell))
    if not wrong:
        return None
    first = wrong[0][0]
    every = {_group(row, cell) for row, cell, _ in updates}
    groups = {_group(row, cell) for row, cell in wrong}
    count = f"{len(wrong)} of {len(updates)} parameters"
    why = (
        f"the gradients of {earlier.place} agree and {count} differ after it: the optimizer, or what changes gradients "
        f"and weights between the steps; groups: {'all' if groups == every else ', '.join(sorted(groups))}"
    )
    what = [cell_words(cell) for row, cell in wrong if row is first]
    return causes.divergence(first, "optimizer", what, first.units("parameter"), why)


def _is_parameter(cell: Cell) -> bool:
    return cell.side == "parameter" and cell.target is not None and cell.golden is not None


def _group(row: Row, cell: Cell) -> str:
    assert cell.golden is not None
    kind = row.pair.call.type.lower()
    if "norm" in kind:
        return "norms"
    if "embedding" in kind:
        return "embeddings"
    return "matrices" if len(cell.golden.shape) > 1 else "biases"


def _update_error(now: Cell, old: Cell) -> float:
    """Return the error of an update relative to the golden one, without what rounding of the parameter explains."""
    assert now.target is not None
    assert now.golden is not None
    assert old.target is not None
    assert old.golden is not None
    after, before = load_pair(now.target, now.golden), load_pair(old.target, old.golden)
    rounding = 4 * epsilon(now.golden.dtype)
    if after and before:
        mine, golden = (x.double() - y.double() for x, y in zip(after, before, strict=True))
        size = float(load(old.golden).double().square().mean().sqrt())
        error, moved = (float(change.square().mean().sqrt()) for change in (mine - golden, golden))
    else:
        scales = _numbers(old.golden)
        size = max(map(abs, scales))
        mine_moved, golden_moved = (
            [x - y for x, y in zip(_numbers(late), _numbers(early), strict=True)]
            for late, early in ((now.target, old.target), (now.golden, old.golden))
        )
        error = max(abs(x - y) for x, y in zip(mine_moved, golden_moved, strict=True))
        moved = max(map(abs, golden_moved))
    error = max(error - rounding * size, 0.0)
    return error / moved if moved else (math.inf if error else 0.0)


def _numbers(value: Value) -> list[float]:
    """Return the statistics at the scale of an element."""
    root = math.sqrt(max(value.count, 1))
    highest, lowest, mean, norm = (number or 0.0 for number in value.statistics)
    return [highest, lowest, mean, norm / root]
