"""Name the symptom of two training curves, by the rules of the table in docs/diagnose.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from referee.errors import NumericsError
from referee.numerics.diagnose.spikes import LOSS as LOSS_JUMPS
from referee.numerics.diagnose.spikes import NORM as NORM_JUMPS
from referee.numerics.diagnose.spikes import find_spikes
from referee.numerics.rows import TableRow
from referee.verdict.loss_files import Curve, LossCurve

LOSS, NORM = "loss", "gradient norm"
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}
# Growth of a difference within one step that rounding explains. Measured between correct kernels: 4.3 where training is
# stable; 15 (loss) and 99 (gradient norm) with a learning rate ten times too large (docs/diagnose.md).
GROWTH = {LOSS: 16.0, NORM: 256.0}
CLEARER = 10.0  # times closer must the curves be for a shift of their step numbers
LARGEST = 1e100  # relative difference; means of it are finite
DIGITS = 500  # values that show how many digits the file has
MOST_STEPS = 100  # of growth; more have a power that no float holds

TOLERANCE = 0.01  # relative difference of the loss (section 1.3)
FIRST_STEPS = 5  # the first several steps
TENTH = 10  # the first steps, and a window of the running mean, are at most a tenth of the common steps
NEAR = 16  # steps within which spikes of both runs are one event
CHANCE = 0.05  # of all evaluations together
ERROR = "_stderr"  # in the name of a column

NOT_REPRODUCIBLE, OVERFLOW, FIRST_STEP = "not reproducible", "overflow or NaN", "first-step difference"
SPIKES, DRIFT, DOWNSTREAM = "spikes", "drift", "downstream only"
BEYOND, ROUNDING, EQUAL = "beyond rounding", "rounding", "equal"


@dataclass(frozen=True)
class CommonValue:
    """A loss or gradient norm that both curves have."""

    step: int
    what: str  # LOSS or NORM
    first: float
    second: float
    relative: float  # the difference; 0 where both are equal, infinite where one is not a number
    explained: float  # the relative difference that rounding explains


@dataclass(frozen=True)
class CurvePair:
    """Two curves at their common steps."""

    sides: tuple[LossCurve, LossCurve]
    steps: list[int]
    values: list[CommonValue]  # in the order of computation: the loss of a step, then its gradient norm
    notes: list[str]

    @property
    def losses(self) -> list[CommonValue]:
        """Return the losses that are finite on both sides."""
        values = (value for value in self.values if value.what == LOSS)
        return [value for value in values if math.isfinite(value.first) and math.isfinite(value.second)]

    @property
    def unequal(self) -> CommonValue | None:
        """Return the first value that is not equal to the last bit, or the last digit of the file."""
        return next((value for value in self.values if value.relative), None)

    @property
    def beyond(self) -> CommonValue | None:
        """Return the first value that differs by more than rounding and its growth explain."""
        return next((value for value in self.values if value.relative > value.explained), None)


def pair_curves(first: LossCurve, second: LossCurve, epsilon: float = EPSILON["float32"]) -> CurvePair:
    """Pair two curves. NumericsError without a common step.

    Where one curve begins at step 0 and the other at step 1, and they are far closer so, the second is shifted.
    """
    notes = []
    shift = first.steps[0] - second.steps[0]
    if {first.steps[0], second.steps[0]} == {0, 1}:
        shifted = second.shifted(shift)
        if CLEARER * _distance(first, shifted) < _distance(first, second):
            second = shifted
            notes.append(f"the steps of {second.name} are shifted by {shift:+d}, where the curves agree best")
    sides = first, second
    steps = sorted(first.losses.keys() & second.losses.keys())
    if not steps:
        ranges = [f"{side.steps[0]} to {side.steps[-1]}" for side in sides]
        raise NumericsError(
            f"the curves have no common step: {ranges[0]} against {ranges[1]}; fix: log both at the same steps"
        )
    counts = [len(side.losses) for side in sides]
    if {*counts} != {len(steps)}:
        notes.append(
            f"{len(steps)} common steps, {steps[0]} to {steps[-1]}, of {counts[0]} and {counts[1]} logged ones"
        )
    for side in sides:
        if not side.numbered and counts[0] != counts[1]:
            notes.append(f"{side.name} has no step numbers: its lines count as steps 1 to {len(side.losses)}")
        if side.damaged:
            notes.append(f"{side.name}: {side.damaged} lines without a number are left out")
    return CurvePair(sides, steps, _common_values(sides, steps, epsilon), notes)


def _common_values(sides: Sequence[LossCurve], steps: Sequence[int], epsilon: float) -> list[CommonValue]:
    """Return every common value with its relative difference.

    Rounding explains GROWTH^g x (epsilon + the largest difference before), for g steps since the last common one, and
    one unit of the last digit in the file. The divisor of losses around zero, as of a policy gradient, is at least
    their median size.
    """
    curves = {LOSS: [side.losses for side in sides], NORM: [side.gradient_norms for side in sides]}
    digits = {what: max(map(_last_digit, both)) for what, both in curves.items()}
    losses = [loss for loss in sides[0].losses.values() if math.isfinite(loss)]
    has_both_signs = bool(losses) and min(losses) < 0 < max(losses)
    floors = {LOSS: float(np.median(np.abs(losses))) if has_both_signs else 0.0, NORM: 0.0}
    values: list[CommonValue] = []
    largest, last = 0.0, steps[0] - 1
    for step in steps:
        for what, (mine, other) in curves.items():
            if step not in mine or step not in other:
                continue
            size = max(abs(mine[step]), floors[what], 1e-300) if math.isfinite(mine[step]) else math.inf
            relative = _relative(mine[step], other[step], size)
            growth = GROWTH[what] ** min(max(1, step - last), MOST_STEPS)
            explained = growth * (epsilon + largest) + 1.01 * digits[what] / size
            values.append(CommonValue(step, what, mine[step], other[step], relative, explained))
            largest = max(largest, relative) if math.isfinite(relative) else largest
            last = step
    return values


def _relative(first: float, second: float, size: float) -> float:
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    return min(abs(first - second) / size, LARGEST)


def _last_digit(curve: Curve) -> float:
    """Return the unit of the last printed digit; 0 for values of full precision."""
    texts = [f"{value:.15g}" for value in list(curve.values())[:DIGITS] if math.isfinite(value)]
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    full = not decimals or any("e" in text or len(text) > 14 for text in texts)
    return 0.0 if full else 10.0**-decimals


def _distance(first: LossCurve, second: LossCurve) -> float:
    """Return the median relative difference at the first common steps; infinite without three of them."""
    steps = sorted(first.losses.keys() & second.losses.keys())[:100]
    pairs = [(first.losses[step], second.losses[step]) for step in steps]
    found = [_relative(mine, other, max(abs(mine), 1e-300)) for mine, other in pairs]
    enough = len(found) > 2 or (found and first.losses.keys() == second.losses.keys())
    return float(np.median(found)) if enough else math.inf


@dataclass(frozen=True)
class SymptomFinding:
    """A symptom that applies, with the two values that show it."""

    symptom: str
    step: int
    what: str = LOSS  # LOSS, NORM or the name of an evaluation
    first: str = ""
    second: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The symptoms of two curves: the first one, and the others that apply."""

    pair: CurvePair
    findings: list[SymptomFinding]
    notes: list[str]

    @property
    def finding(self) -> SymptomFinding:
        return self.findings[0]

    @property
    def symptom(self) -> str:
        return self.finding.symptom

    def rows(self) -> list[TableRow]:
        """Return a row for each symptom, for the first unequal value and the first beyond rounding."""
        rows = [
            TableRow(found.symptom, found.what, f"step {found.step}", found.second, found.first, math.nan)
            for found in self.findings
            if found.symptom not in (BEYOND, ROUNDING, EQUAL)
        ]
        unequal, beyond = self.pair.unequal, self.pair.beyond
        if unequal and unequal != beyond:
            rows.append(_value_row("first unequal", unequal))
        if beyond:
            rows.append(_value_row("first beyond rounding", beyond))
        return rows


def _value_row(name: str, value: CommonValue) -> TableRow:
    place, texts = f"step {value.step}", (f"{value.second:.9g}", f"{value.first:.9g}")
    return TableRow(name, value.what, place, *texts, value.relative, value.explained)


@np.errstate(over="ignore", invalid="ignore")  # losses up to the largest float
def diagnose(pair: CurvePair, same_settings: bool = False) -> Diagnosis:
    """Apply the rules in their order. same_settings: whether both runs have the same machine and settings."""
    unequal, beyond, notes = pair.unequal, pair.beyond, [*pair.notes]
    found = [_of(NOT_REPRODUCIBLE, unequal)] if same_settings and unequal else []
    bad = [_not_finite(pair, side) for side in (0, 1)]
    overflows = _overflow(bad, pair.steps[-1])
    if not overflows and (both := sorted(bad[0].keys() & bad[1].keys())):
        notes.append(f"both runs have {len(both)} steps that are not finite, from step {both[0]}")
    first_steps = _first_steps(pair.losses)
    found += [*overflows, *first_steps]
    if not first_steps:
        spikes = {what: _spikes_of(pair, what) for what in (LOSS, NORM)}
        later = [*_more_spikes(spikes), *_drift(pair.losses, [*spikes[LOSS][0], *spikes[LOSS][1]])]
        found += sorted(later, key=lambda finding: finding.step)
    parted = differing_evaluations(pair)
    if found:
        notes += [f"{name}: {first} against {second}" for name, first, second in parted]
        return Diagnosis(pair, found, notes)
    found = [SymptomFinding(DOWNSTREAM, pair.steps[-1], *texts) for texts in parted]
    if not found:
        small = _of(BEYOND, beyond) if beyond else _of(ROUNDING, unequal) if unequal else None
        found = [small or SymptomFinding(EQUAL, pair.steps[0])]
    return Diagnosis(pair, found, notes)


def _of(symptom: str, value: CommonValue) -> SymptomFinding:
    return SymptomFinding(symptom, value.step, value.what, f"{value.first!r}", f"{value.second!r}")


# -- the rules


def _not_finite(pair: CurvePair, side: int) -> dict[int, str]:
    """Return step -> loss or norm, whichever is not finite first, of a run."""
    values = ((value, (value.first, value.second)[side]) for value in reversed(pair.values))
    return {value.step: value.what for value, number in values if not math.isfinite(number)}


def _overflow(bad: Sequence[dict[int, str]], end: int) -> list[SymptomFinding]:
    """Find a run with steps that are not finite, where the other run's are. bad: of each run, `_not_finite`.

    It counts where the last step is one of them, or the other run has no such step or clearly fewer.
    """
    alone = [sorted(bad[side].keys() - bad[1 - side].keys()) for side in (0, 1)]
    texts = [f"not finite in {len(steps)} steps" for steps in bad]
    return [
        SymptomFinding(OVERFLOW, mine[0], bad[side][mine[0]], *texts)
        for side, mine, others in ((0, alone[0], alone[1]), (1, alone[1], alone[0]))
        if mine and (end in mine or not bad[1 - side] or more_frequent(len(mine), len(others)))
    ]


def more_frequent(count: int, other: int) -> bool:
    """Return whether count events against other ones have a probability of at most 1/8 at equal rates.

    Given the sum, the count is binomial with 1/2 (Przyborowski and Wilenski 1940): 3 to 0, 5 to 1 and 7 to 2 count. The
    normal approximation with its correction for whole numbers; 1.15 is its quantile of 7/8.
    """
    return count - other - 1 > 1.15 * math.sqrt(count + other)


def _first_steps(losses: Sequence[CommonValue]) -> list[SymptomFinding]:
    """Find a loss that differs by over 1 % at the first common step, or in the mean of the first five."""
    first = losses[: max(1, min(FIRST_STEPS, len(losses) // TENTH))]
    over = [loss for loss in first if loss.relative > TOLERANCE]
    if not over or (
        over[0] != first[0] and math.fsum(loss.relative for loss in first) <= TOLERANCE * len(first)
    ):
        return []
    return [_of(FIRST_STEP, over[0])]


def _spikes_of(pair: CurvePair, what: str) -> list[list[range]]:
    """Return the spikes of each side, as steps."""
    values = [value for value in pair.values if value.what == what]
    jumps = LOSS_JUMPS if what == LOSS else NORM_JUMPS
    sides = ([value.first for value in values], [value.second for value in values])
    return [
        [
            range(values[first].step, values[last].step + 1)
            for first, last in find_spikes(np.array(side), jumps)
        ]
        for side in sides
    ]


def _more_spikes(spikes: dict[str, list[list[range]]]) -> list[SymptomFinding]:
    """Find a run with clearly more spikes; the first is the first without a spike of the other run near."""
    found = []
    for what, sides in spikes.items():
        texts = [f"{len(steps)} spikes" for steps in sides]
        for mine, others in (sides, sides[::-1]):
            if more_frequent(len(mine), len(others)):
                near = [any(abs(one.start - two.start) <= NEAR for two in others) for one in mine]
                alone = [one.start for one, is_near in zip(mine, near, strict=True) if not is_near]
                found.append(SymptomFinding(SPIKES, alone[0] if alone else mine[0].start, what, *texts))
    return found


def _drift(losses: Sequence[CommonValue], spikes: Sequence[range]) -> list[SymptomFinding]:
    """Find the first tenth of the common steps whose mean difference is over the tolerance, without spikes."""
    losses = [loss for loss in losses if not any(loss.step in steps for steps in spikes)]
    width = max(1, len(losses) // TENTH)
    if len(losses) < 2:
        return []
    sums = np.cumsum([0.0, *(loss.relative for loss in losses)])
    over = np.flatnonzero((sums[width:] - sums[:-width]) / width > TOLERANCE)
    later = losses[over[0] :] if len(over) else []
    return [_of(DRIFT, loss) for loss in later if loss.relative > TOLERANCE][:1]


def differing_evaluations(pair: CurvePair) -> list[tuple[str, str, str]]:
    """Return the name and both values of each evaluation of both files that differs by over 1 % and by over chance.

    Each counts by its mean over the last tenth of the common steps. Where its standard error is unknown, 1 % decides.
    """
    one, other = (side.evaluations for side in pair.sides)
    shared = {name: sorted(one[name].keys() & other[name].keys()) for name in one if name in other}
    last = {name: at[-max(1, len(at) // TENTH) :] for name, at in shared.items() if at and ERROR not in name}
    limit = NormalDist().inv_cdf(1 - CHANCE / 2 / max(1, len(last)))
    found = []
    for name, steps in last.items():
        (mine, my_error), (theirs, their_error) = (_mean(table, name, steps) for table in (one, other))
        difference = abs(mine - theirs)
        if math.isfinite(difference):
            differs = difference > max(TOLERANCE * abs(mine), limit * math.hypot(my_error, their_error))
        else:
            differs = math.isfinite(mine) != math.isfinite(theirs)
        if differs:
            at = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            unknown = "" if my_error and their_error else ", error unknown"
            found.append((f"{name} at {at}{unknown}", f"{mine:.6g}", f"{theirs:.6g}"))
    return found


def _mean(table: dict[str, Curve], name: str, steps: Sequence[int]) -> tuple[float, float]:
    """Return the mean of an evaluation and its standard error, 0 where it is unknown.

    The error is that of the column with stderr in its name at the last step, else that of the mean.
    """
    values = [table[name][step] for step in steps]
    mean = math.fsum(values) / len(values)
    columns = (curve for column, curve in table.items() if column.replace(ERROR, "") == name != column)
    known = next(columns, {}).get(steps[-1])
    if known is None:
        known = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 2 else 0.0
    return mean, known


def step_to_record(diagnosis: Diagnosis) -> int | None:
    """Return the step whose record shows most (sections 2.3.1.1 to 2.3.2.2); None where rounding explains everything.

    The first step that is not finite or reproducible, the last common step where only evaluations differ, else the
    first step beyond rounding, or a spike before it.
    """
    symptom, step = diagnosis.symptom, diagnosis.finding.step
    if symptom in (ROUNDING, EQUAL):
        return None
    if symptom in (NOT_REPRODUCIBLE, OVERFLOW, DOWNSTREAM):
        return step
    first = diagnosis.pair.beyond or diagnosis.pair.unequal
    assert first is not None
    return min(first.step, step) if symptom == SPIKES else first.step
