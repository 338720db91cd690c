"""Name the symptom of two training curves. Every rule is a line of SYMPTOMS; docs/numerics.md shows the same table."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from numerics.diagnose.loss_files import Curve, LossCurve
from numerics.diagnose.pair import LOSS, NORM, CurvePair, DifferingValue
from numerics.diagnose.spikes import LOSS as LOSS_JUMPS
from numerics.diagnose.spikes import NORM as NORM_JUMPS
from numerics.diagnose.spikes import CurveSpike, find_spikes
from numerics.rows import TableRow

TOLERANCE = 0.01  # relative difference of the loss (section 1.3)
FIRST_STEPS = 5  # the first several steps
TENTH = 10  # the first steps, and a window of the running mean, are at most a tenth of the common steps
ODDS = 8  # at equal rates, an excess that counts has a probability of at most one in eight: 3 to 0, 5 to 1, 7 to 2
NEAR = 16  # logged steps within which spikes of both runs are one event
TWO_SIDED = 1.96  # standard errors
ERROR = "_stderr"  # in the name of a column

NOT_REPRODUCIBLE, OVERFLOW, FIRST_STEP = "not reproducible", "overflow or NaN", "first-step difference"
SPIKES, DRIFT, DOWNSTREAM = "spikes", "drift", "downstream only"
BEYOND, NONE = "beyond rounding", "none"
SYMPTOMS = {  # name -> rule, and the section of the guide with the way to the cause
    NOT_REPRODUCIBLE: (
        "both runs have the same machine and settings, and a loss or gradient norm differs in any bit",
        "2.3.2",
    ),
    OVERFLOW: (
        "a loss or gradient norm is not finite where the other run's is, and one of these holds: the other run is "
        "finite everywhere, this run is not finite in its last steps, or this run has clearly more such steps",
        "1.3, 2.3.1.1",
    ),
    FIRST_STEP: (
        "the relative difference of the loss is over 1 % at the first common step, or in the mean of the first "
        "common steps (five, at most a tenth)",
        "1.3, 2.3.1.2",
    ),
    SPIKES: (
        "one run has clearly more spikes of the loss or gradient norm than the other, such as 3 against 0 or 5 "
        "against 1; spikes of both runs at one place do not count",
        "1.3, 2.3.1.3",
    ),
    DRIFT: (
        "the first steps agree, and the mean relative difference over a tenth of the common steps is over 1 % "
        "later; spikes do not count",
        "1.3, 2.3.1.3",
    ),
    DOWNSTREAM: (
        "none of the above, and an evaluation differs by over 1 % and, where its standard error is known, by more "
        "than 1.96 of them",
        "1.3, 2.3.2.4",
    ),
    BEYOND: (
        "none of the above, and a value differs by more than the growth of rounding explains",
        "2.3.1.2",
    ),
    NONE: ("no rule above applies", "1.2"),
}


@dataclass(frozen=True)
class Score:
    """An evaluation of both runs. error: the standard error of the difference, None where it is unknown."""

    name: str
    first: float
    second: float
    error: float | None = None

    @property
    def relative(self) -> float:
        return abs(self.first - self.second) / max(abs(self.first), 1e-300)

    @property
    def differs(self) -> bool:
        if not (math.isfinite(self.first) and math.isfinite(self.second)):
            return math.isfinite(self.first) != math.isfinite(self.second)
        known = self.error is None or abs(self.first - self.second) > TWO_SIDED * self.error
        return self.relative > TOLERANCE and known


@dataclass(frozen=True)
class SymptomFinding:
    """A symptom that applies, with the two values that show it."""

    symptom: str
    step: int
    what: str = LOSS  # LOSS, NORM or the name of an evaluation
    first: str = ""
    second: str = ""
    side: int | None = None  # 0 or 1, the run that shows it; None for both

    def row(self) -> TableRow:
        return TableRow(self.symptom, self.what, f"step {self.step}", self.second, self.first, math.nan)


@dataclass(frozen=True)
class Diagnosis:
    """The symptoms of two curves: the first one, and the others that apply."""

    pair: CurvePair
    findings: list[SymptomFinding]
    unequal: DifferingValue | None  # the first value that is unequal in any bit
    beyond: DifferingValue | None  # the first that rounding does not explain
    scores: list[Score] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def finding(self) -> SymptomFinding:
        return self.findings[0]

    @property
    def symptom(self) -> str:
        return self.finding.symptom

    def rows(self) -> list[TableRow]:
        """Return a row for each symptom, for the first unequal value and the first beyond rounding."""
        rows = [finding.row() for finding in self.findings if finding.symptom != NONE]
        for name, value in (("first unequal", self.unequal), ("first beyond rounding", self.beyond)):
            if value is not None:
                texts = f"{value.second:.9g}", f"{value.first:.9g}"
                rows.append(TableRow(name, value.what, f"step {value.step}", *texts, value.relative))
        return rows


@np.errstate(over="ignore", invalid="ignore")  # losses up to the largest float
def diagnose(pair: CurvePair, same_settings: bool = False, scores: Sequence[Score] = ()) -> Diagnosis:
    """Apply the rules. same_settings: whether machine and settings of both runs are the same."""
    unequal, beyond = pair.first_unequal(), pair.first_beyond_rounding()
    every = [*scores, *evaluations(pair)]
    notes = [*pair.notes, *(note for side in pair.sides for note in _reading_notes(side))]
    spikes = {what: [_spikes_of(pair, side, what) for side in (0, 1)] for what in (LOSS, NORM)}
    found = [_of(NOT_REPRODUCIBLE, unequal)] if same_settings and unequal else []
    found += [*_overflow(pair, notes), *_first_steps(pair)]
    if not any(finding.symptom == FIRST_STEP for finding in found):
        later = [*_more_spikes(spikes, notes), *_drift(pair, spikes)]
        found += sorted(later, key=lambda finding: finding.step)
    if not found:
        last = int(pair.steps[-1])
        found = [
            SymptomFinding(DOWNSTREAM, last, score.name, f"{score.first:.6g}", f"{score.second:.6g}")
            for score in every
            if score.differs
        ]
    found = found or ([_of(BEYOND, beyond)] if beyond else [])
    return Diagnosis(pair, found or [SymptomFinding(NONE, int(pair.steps[0]))], unequal, beyond, every, notes)


def _of(symptom: str, value: DifferingValue) -> SymptomFinding:
    return SymptomFinding(symptom, value.step, value.what, f"{value.first!r}", f"{value.second!r}")


def _reading_notes(curve: LossCurve) -> list[str]:
    counts = (
        (curve.damaged, "lines without a number are left out"),
        (curve.repeated, "lines repeat a step: the last of a step counts"),
    )
    return [f"{curve.name}: {count} {text}" for count, text in counts if count]


# -- the rules


def _overflow(pair: CurvePair, notes: list[str]) -> list[SymptomFinding]:
    """Compare the steps with values that are not finite."""
    bad = [_not_finite(curve) for curve in pair.sides]
    alone = [
        [step for step in sorted(bad[side]) if _is_finite_near(pair.sides[1 - side], step, bad[1 - side])]
        for side in (0, 1)
    ]
    found = []
    for side, curve in enumerate(pair.sides):
        until_end = itertools.takewhile(bad[side].__contains__, reversed(curve.steps))
        ends = any(step in alone[side] for step in until_end)
        frequent = more_frequent(len(alone[side]), len(alone[1 - side]))
        if alone[side] and (not bad[1 - side] or ends or frequent):
            step = alone[side][0]
            what = LOSS if not math.isfinite(curve.losses.get(step, 0.0)) else NORM
            first, second = (f"not finite in {len(bad[place])} steps" for place in (0, 1))
            found.append(SymptomFinding(OVERFLOW, step, what, first, second, side))
    if not found and (both := sorted(bad[0] & bad[1])):
        notes.append(f"both runs have {len(both)} steps that are not finite, from step {both[0]}")
    return sorted(found, key=lambda finding: finding.step)


def _not_finite(curve: LossCurve) -> set[int]:
    values = [*curve.losses.items(), *curve.gradient_norms.items()]
    return {step for step, value in values if not math.isfinite(value)}


def _is_finite_near(other: LossCurve, step: int, bad: set[int]) -> bool:
    """Return whether a curve is finite at a step; where it has no value there, at the values before and after."""
    if step in other.losses:
        return step not in bad
    steps = other.steps
    place = bisect.bisect(steps, step)
    return 0 < place < len(steps) and not {steps[place - 1], steps[place]} & bad


def more_frequent(count: int, other: int) -> bool:
    """Return whether count events against other ones have a probability of at most 1 / ODDS at equal rates.

    Given the sum, the count is binomial with 1/2 (Przyborowski and Wilenski 1940).
    """
    total = count + other
    if total > 1000:  # the normal approximation
        return count - other > 1.15 * math.sqrt(total)
    return ODDS * sum(math.comb(total, k) for k in range(count, total + 1)) <= (1 << total)


def _first_steps(pair: CurvePair) -> list[SymptomFinding]:
    differences = list(pair.differences().items())
    first = differences[: max(1, min(FIRST_STEPS, len(differences) // TENTH))]
    if not first:
        return []
    mean = math.fsum(value for _, value in first) / len(first)
    if max(first[0][1], mean) <= TOLERANCE:
        return []
    step = next(step for step, value in first if value > TOLERANCE)
    return [_of(FIRST_STEP, next(place for place in pair.places if place.step == step))]


Spikes = dict[str, list[list[tuple[int, CurveSpike]]]]  # LOSS or NORM -> of each run: step and spike


def _spikes_of(pair: CurvePair, side: int, what: str) -> list[tuple[int, CurveSpike]]:
    curve = pair.sides[side]
    values = curve.losses if what == LOSS else curve.gradient_norms
    other = pair.sides[1 - side].gradient_norms
    steps = [step for step in pair.steps.tolist() if what == LOSS or (step in values and step in other)]
    series = np.array([values[step] for step in steps])
    return [
        (steps[one.first], one) for one in find_spikes(series, LOSS_JUMPS if what == LOSS else NORM_JUMPS)
    ]


def _more_spikes(spikes: Spikes, notes: list[str]) -> list[SymptomFinding]:
    found = []
    for what in (LOSS, NORM):
        alone = [_without_match(spikes[what][side], spikes[what][1 - side]) for side in (0, 1)]
        first, second = (f"{len(of_run)} spikes" for of_run in alone)
        for side in (0, 1):
            if not alone[side]:
                continue
            step = alone[side][0][0]
            if more_frequent(len(alone[side]), len(alone[1 - side])):
                found.append(SymptomFinding(SPIKES, step, what, first, second, side))
            else:
                notes.append(f"spikes of the {what} in one run, from step {step}: {first} against {second}")
    return found


def _without_match(
    mine: list[tuple[int, CurveSpike]], others: list[tuple[int, CurveSpike]]
) -> list[tuple[int, CurveSpike]]:
    """Return the spikes without one of the other run near; each of those matches one."""
    free = [spike for _, spike in others]
    alone = []
    for step, spike in mine:
        near = next((other for other in free if abs(other.first - spike.first) <= NEAR), None)
        if near is None:
            alone.append((step, spike))
        else:
            free.remove(near)
    return alone


def _drift(pair: CurvePair, spikes: Spikes) -> list[SymptomFinding]:
    """Find the first tenth of the common steps whose mean difference is over the tolerance, without spikes."""
    steps = pair.steps.tolist()
    ranges = [range(one.first, one.last + 1) for of_run in spikes[LOSS] for _, one in of_run]
    within = {steps[place] for places in ranges for place in places}
    items = [(step, value) for step, value in pair.differences().items() if step not in within]
    width = max(1, len(items) // TENTH)
    if len(items) < 2:
        return []
    values = np.array([value for _, value in items])
    sums = np.cumsum([0.0, *values])
    means = (sums[width:] - sums[:-width]) / width
    over = np.flatnonzero(means > TOLERANCE)
    if not len(over):
        return []
    first = next(step for step, value in items[over[0] :] if value > TOLERANCE)
    for of_run in spikes[LOSS]:  # a jump whose level stays apart
        first = min([first, *(step for step, spike in of_run if steps.index(first) == spike.last + 1)])
    return [_of(DRIFT, next(place for place in pair.places if place.step == first))]


def evaluations(pair: CurvePair) -> list[Score]:
    """Return the evaluations of both files: each by its mean over the last tenth of the common steps.

    The standard error is that of a column with stderr in its name, else that of the mean.
    """
    found = []
    tables = [side.evaluations for side in pair.sides]
    for name in [name for name in tables[0] if name in tables[1] and ERROR not in name]:
        common = sorted(tables[0][name].keys() & tables[1][name].keys())
        if not common:
            continue
        last = common[-max(1, len(common) // TENTH) :]
        values = [[table[name][step] for step in last] for table in tables]
        errors = [_error(table, name, last, part) for table, part in zip(tables, values, strict=True)]
        error = None if None in errors else math.hypot(*(error for error in errors if error is not None))
        title = f"{name} at step {last[0]}" if len(last) == 1 else f"{name} at steps {last[0]} to {last[-1]}"
        first, second = (math.fsum(part) / len(part) for part in values)
        found.append(Score(title, first, second, error))
    return found


def _error(table: dict[str, Curve], name: str, steps: Sequence[int], values: Sequence[float]) -> float | None:
    """Return the standard error of a mean of evaluations; None where it is unknown."""
    known = next(
        (curve for other, curve in table.items() if ERROR in other and other.replace(ERROR, "") == name), {}
    )
    if steps[-1] in known:
        return known[steps[-1]]
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 2 else None


def step_to_record(diagnosis: Diagnosis) -> int | None:
    """Return the step whose record shows most (sections 2.3.1.1 to 2.3.2.2); None where all values are equal.

    The first step that is not finite, the last common step where only evaluations differ, the first spike where nothing
    differs beyond rounding before it, else the first step beyond rounding, else the first unequal one.
    """
    value = (
        diagnosis.unequal if diagnosis.symptom == NOT_REPRODUCIBLE else diagnosis.beyond or diagnosis.unequal
    )
    if diagnosis.symptom in (OVERFLOW, DOWNSTREAM):
        return diagnosis.finding.step
    if diagnosis.symptom == SPIKES and (value is None or value.step > diagnosis.finding.step):
        return diagnosis.finding.step
    return None if value is None or diagnosis.symptom == NONE else value.step
