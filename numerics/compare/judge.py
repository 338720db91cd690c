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
from numerics.compare.causes.divergence import Divergence
from numerics.compare.causes.missing import Missing
from numerics.compare.causes.updates import Earlier, hidden_errors, is_parameter, judge_updates
from numerics.compare.replay import replayed_error
from numerics.compare.table.cancellation import Terms
from numerics.compare.table.rows import BEYOND, EQUAL, ROUNDING, UNMATCHED, WRONG, CallRow
from numerics.compare.table.step_record import StepRecord
from numerics.rounding.replayed_calls import NotReplayableError

# The largest growth measured between correct kernels was 7.5 (14 for q, k and v as three layers), the largest error of
# a float64 replay 2.5 (float32 products of 8192 terms): tests/numerics/compare.
GROWTH = 16.0
REPLAY = 8.0  # units of rounding


@dataclass
class Judgement:
    """verdict: equal, rounding or diverges. first_difference: the first call that ended with an unequal result.

    undecided: arguments that differ where rounding of the inputs may hide their effect.
    """

    verdict: str
    divergence: Divergence | None
    first_difference: CallRow | None
    findings: list[str] = field(default_factory=list)
    growths: list[tuple[float, str]] = field(default_factory=list)  # error / explained error, by row
    undecided: list[str] = field(default_factory=list)


def judge(
    rows: Sequence[CallRow],
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
        scan.hidden = hidden_errors(rows, earlier)
        scan.found = judge_updates(rows, earlier, GROWTH, scan.causes)
    for late in (False, True):  # what is computed of gradients, after the gradients
        for row in rows:
            if row.grade != UNMATCHED and row.pair.call.late == late:
                scan.enter(row)
        scan.close_all()
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
    return Judgement(verdict, scan.found, first, _findings(rows, scan.found), scan.growths, scan.undecided)


class _Scan:
    def __init__(
        self, rows: Sequence[CallRow], target: StepRecord, golden: StepRecord, envelope: Mapping[str, float]
    ) -> None:
        self.rows, self.envelope = rows, envelope
        self.causes = Causes(rows, target, golden)
        self.missing = Missing(self.causes)
        self.terms = Terms(golden)
        self.forward = {row.name: row for row in rows if not row.pair.call.backward}
        self.stack: list[CallRow] = []
        self.seen = 0.0  # the largest explained error so far
        self.coarsest = 0.0  # the largest epsilon of unequal results so far
        self.found: Divergence | None = None
        self.growths: list[tuple[float, str]] = []
        self.undecided: list[str] = []
        self.unequal_inputs = False
        self.first_unequal: CallRow | None = None  # the first call that ended with an unequal result
        self.hidden: dict[str, float] = {}  # errors of parameters that statistics hide, by row
        self.updated = False  # by an optimizer's step, which explains the parameters' errors

    @property
    def explained_before(self) -> float:
        return self.seen if math.isfinite(self.seen) else 0.0

    # -- in the order of execution

    def enter(self, row: CallRow) -> None:
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
        self.unequal_inputs |= not (row.equal("input") or _overwrites(row))
        if self.updated and not self.causes.has_modules:
            self.seen = max(self.seen, _parameter_error(row))
        if error and (not row.equal("output") or not any(cell.side == "output" for cell in row.cells)):
            explained = self._rounding(row) + self.seen
            if error > GROWTH * explained:
                error = self.terms.error(row, "input")
            self._grown(error, explained, row)
            if error > GROWTH * explained:
                wrong = [
                    cell
                    for cell in row.cells
                    if cell.side == "input" and cell.difference.error > GROWTH * (row.epsilon + self.seen)
                ]
                trusted = not (self.causes.many or self.updated)
                self.found = self.causes.entered(row, wrong, self.stack, trusted)
                if row.pair.call.late and self.found.cause == "between":
                    self.found = self._gradients() or self.found
        if self.found:
            return
        if self.updated or self.causes.many:
            if not self.updated and row.error("parameter") > GROWTH * row.epsilon:
                self.found = self.causes.parameters(row)
            self.seen = max(self.seen, row.error("parameter"))
        self.stack.append(row)

    def close_all(self) -> None:
        while self.stack:
            self._close(self.stack.pop())

    def end(self) -> None:
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

    def _close(self, row: CallRow) -> None:
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

    def _explained(self, row: CallRow) -> float:
        """Return the error that explains one of the call's results."""
        sources = [row.error("input"), row.error("parameter"), row.inner]
        sources += [known.get(row.name, 0.0) for known in (self.hidden, self.envelope)]
        forward = self.forward.get(row.pair.call.forward_name)
        if row.pair.call.backward and forward is not None:
            sources += [
                forward.error("input"),
                forward.error("parameter"),
                forward.error("output"),
                forward.inner,
            ]
        return self._rounding(row) + max(sources)

    def _rounding(self, row: CallRow) -> float:
        """Return the rounding that a call's input may carry.

        Statistics hide errors of single elements: an unequal input carries at least the rounding of the coarsest dtype
        before it.
        """
        if row.equal("input") and row.equal("parameter") and not row.inner and not row.pair.call.backward:
            return row.epsilon
        return max(row.epsilon, self.coarsest)

    def _own(self, row: CallRow, error: float) -> Divergence | None:
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
            wrong = max(row.replayed) > REPLAY * _room(row)
        else:
            if error > GROWTH * explained:
                error = self.terms.error(row, "output")
            self._grown(error, explained, row)
            wrong = error > GROWTH * explained
        changed = [text for text in row.settings if not text.startswith("class")]
        if row.pair.call.late and row.replayed is None and not row.equal("input") and not changed:
            bound = math.sqrt(GROWTH * explained)  # as of an update: see judge_updates
            wrong = wrong and _is_large_update(row, bound)
        weak = bool(changed) and row.equal("input") and not row.pair.call.backward and not row.inner
        if not wrong and not weak:
            if row.replayed is None and not (row.equal("input") or row.pair.call.is_module):
                self.undecided += [f"{row.name}: {text}" for text in changed if text.startswith("argument")]
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

    def _grown(self, error: float, explained: float, row: CallRow) -> None:
        if explained:
            self.growths.append((error / explained, row.name))


def replay(row: CallRow, layers: bool) -> None:
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


def _integers_without_values(row: CallRow) -> str:
    """Return the names of integer inputs of which only the range is known, if all inputs are integers."""
    values = [(cell.place, cell.golden) for cell in row.cells if cell.side == "input"]
    if any(value is None or value.floating or value.checksum or value.file for _, value in values):
        return ""
    return ", ".join(f"input {place}" for place, _ in values)


def _findings(rows: Sequence[CallRow], divergence: Divergence | None) -> list[str]:
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


def _overwrites(row: CallRow) -> bool:
    """Return whether a function wrote over all of its first argument that differs: memory that nothing had set."""
    places = {cell.place for cell in row.cells if cell.side == "input" and not cell.difference.equal}
    is_function = not (row.pair.call.is_module or row.pair.call.backward)
    return is_function and row.pair.call.path[-1:] == "_" and places == {"0"} and row.equal("output")


def _parameter_error(row: CallRow) -> float:
    """Return the error of the parameters among a function's inputs."""
    return max((cell.difference.error for cell in row.cells if is_parameter(cell)), default=0.0)


def _is_large_update(row: CallRow, bound: float) -> bool:
    """Return whether a parameter that a function overwrote differs by more than the bound; a bias is not judged."""
    cells = [cell for cell in row.cells if cell.side == "output"]
    matrices = [cell for cell in cells if cell.golden is not None and len(cell.golden.shape) > 1]
    return row.pair.call.writes_parameter and any(cell.difference.error > bound for cell in matrices)


def _room(row: CallRow) -> float:
    """Return how much larger a replay's bound is: a norm of all gradients may be one partial sum of n terms."""
    most = max((value.count for value in row.pair.call.inputs.values()), default=0)
    return max(1.0, math.sqrt(most) / 8) if row.pair.call.late else 1.0
