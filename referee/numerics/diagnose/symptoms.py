"""Name the symptom of two training curves, by the rules of the table in docs/diagnose.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from referee.numerics.diagnose.pair import LOSS, NORM, CurvePair, DifferingValue
from referee.numerics.diagnose.spikes import LOSS as LOSS_JUMPS
from referee.numerics.diagnose.spikes import NORM as NORM_JUMPS
from referee.numerics.diagnose.spikes import CurveSpike, find_spikes
from referee.numerics.rows import TableRow
from referee.verdict.loss_files import Curve, LossCurve

TOLERANCE = 0.01  # relative difference of the loss (section 1.3)
FIRST_STEPS = 5  # the first several steps
TENTH = 10  # the first steps, and a window of the running mean, are at most a tenth of the common steps
ODDS = 8  # at equal rates, an excess that counts has a probability of at most one in eight: 3 to 0, 5 to 1, 7 to 2
NEAR = 16  # logged steps within which spikes of both runs are one event
CHANCE = 0.05  # of all evaluations together
ERROR = "_stderr"  # in the name of a column

NOT_REPRODUCIBLE, OVERFLOW, FIRST_STEP = "not reproducible", "overflow or NaN", "first-step difference"
SPIKES, DRIFT, DOWNSTREAM = "spikes", "drift", "downstream only"
BEYOND, ROUNDING, EQUAL = "beyond rounding", "rounding", "equal"
SYMPTOMS = {  # name -> the sections of the guide with the way to the cause, in the order in which the rules apply
    NOT_REPRODUCIBLE: "2.3.2",
    OVERFLOW: "1.3, 2.3.1.1",
    FIRST_STEP: "1.3, 2.3.1.2",
    SPIKES: "1.3, 2.3.1.3",
    DRIFT: "1.3, 2.3.1.3",
    DOWNSTREAM: "1.3, 2.3.2.4",
    BEYOND: "2.3.1.2",
    ROUNDING: "1.2",
    EQUAL: "1.2",
}


@dataclass(frozen=True)
class SymptomFinding:
    """A symptom that applies, with the two values that show it."""

    symptom: str
    step: int
    what: str = LOSS  # LOSS, NORM or the name of an evaluation
    first: str = ""
    second: str = ""
    side: int | None = None  # 0 or 1, the run that shows it; None for both


@dataclass(frozen=True)
class Diagnosis:
    """The symptoms of two curves: the first one, and the others that apply."""

    pair: CurvePair
    findings: list[SymptomFinding]
    unequal: DifferingValue | None  # the first value that is unequal in any bit
    beyond: DifferingValue | None  # the first that rounding does not explain
    notes: list[str] = field(default_factory=list)

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
        values = {"first unequal": self.unequal, "first beyond rounding": self.beyond}
        if self.unequal == self.beyond:
            del values["first unequal"]
        for name, value in values.items():
            if value is not None:
                texts = f"{value.second:.9g}", f"{value.first:.9g}"
                rows.append(TableRow(name, value.what, f"step {value.step}", *texts, value.relative))
        return rows


@np.errstate(over="ignore", invalid="ignore")  # losses up to the largest float
def diagnose(pair: CurvePair, same_settings: bool = False) -> Diagnosis:
    """Apply the rules in the order of SYMPTOMS. same_settings: whether both runs have the same machine and settings."""
    unequal, beyond = pair.first_unequal(), pair.first_beyond_rounding()
    notes = [*pair.notes, *(note for side in pair.sides for note in _reading_notes(side))]
    found = [_of(NOT_REPRODUCIBLE, unequal)] if same_settings and unequal else []
    found += [*_overflow(pair, notes), *_first_steps(pair)]
    if not any(finding.symptom == FIRST_STEP for finding in found):
        spikes = {what: [_spikes_of(pair, side, what) for side in (0, 1)] for what in (LOSS, NORM)}
        later = [*_more_spikes(spikes, notes), *_drift(pair, spikes[LOSS])]
        found += sorted(later, key=lambda finding: finding.step)
    parted = differing_evaluations(pair)
    notes += [f"{name}: {first} against {second}" for name, first, second in parted if found]
    found = found or [SymptomFinding(DOWNSTREAM, pair.steps[-1], *texts) for texts in parted]
    if not found:
        small = _of(BEYOND, beyond) if beyond else _of(ROUNDING, unequal) if unequal else None
        found = [small or SymptomFinding(EQUAL, pair.steps[0])]
    return Diagnosis(pair, found, unequal, beyond, notes)


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
    """Find a run with a loss or norm that is not finite in steps where the other run's is.

    It counts where the last step is one of them, or the other run has no such step or clearly fewer.
    """
    bad: list[dict[int, str]] = [{}, {}]  # of each run: step -> loss or norm
    for place in pair.places:
        for side, value in enumerate((place.first, place.second)):
            if not math.isfinite(value):
                bad[side].setdefault(place.step, place.what)
    alone = [sorted(bad[side].keys() - bad[1 - side].keys()) for side in (0, 1)]
    first, second = (f"not finite in {len(steps)} steps" for steps in bad)
    found = []
    for side in (0, 1):
        ends = pair.steps[-1] in alone[side]
        if alone[side] and (
            ends or not bad[1 - side] or more_frequent(len(alone[side]), len(alone[1 - side]))
        ):
            step = alone[side][0]
            found.append(SymptomFinding(OVERFLOW, step, bad[side][step], first, second, side))
    if not found and (both := sorted(bad[0].keys() & bad[1].keys())):
        notes.append(f"both runs have {len(both)} steps that are not finite, from step {both[0]}")
    return found


def more_frequent(count: int, other: int) -> bool:
    """Return whether count events against other ones have a probability of at most 1 / ODDS at equal rates.

    Given the sum, the count is binomial with 1/2 (Przyborowski and Wilenski 1940). The normal approximation with its
    correction for whole numbers; 1.15 is its quantile of 1 - 1 / ODDS.
    """
    return count - other - 1 > 1.15 * math.sqrt(count + other)


def _first_steps(pair: CurvePair) -> list[SymptomFinding]:
    """Find a loss that differs by over 1 % at the first common step, or in the mean of the first five."""
    differences = list(pair.differences().items())
    first = differences[: max(1, min(FIRST_STEPS, len(differences) // TENTH))]
    if not first or max(first[0][1], math.fsum(value for _, value in first) / len(first)) <= TOLERANCE:
        return []
    step = next(step for step, value in first if value > TOLERANCE)
    return [_of(FIRST_STEP, next(place for place in pair.places if place.step == step))]


Spikes = list[tuple[int, CurveSpike]]  # step and spike


def _spikes_of(pair: CurvePair, side: int, what: str) -> Spikes:
    curves = [curve.losses if what == LOSS else curve.gradient_norms for curve in pair.sides]
    steps = [step for step in pair.steps if step in curves[0] and step in curves[1]]
    series = np.array([curves[side][step] for step in steps])
    found = find_spikes(series, LOSS_JUMPS if what == LOSS else NORM_JUMPS)
    return [(steps[spike.first], spike) for spike in found]


def _more_spikes(spikes: dict[str, list[Spikes]], notes: list[str]) -> list[SymptomFinding]:
    found = []
    for what, sides in spikes.items():
        alone = [_without_match(sides[side], sides[1 - side]) for side in (0, 1)]
        first, second = (f"{len(steps)} spikes" for steps in alone)
        for side in (0, 1):
            if more_frequent(len(alone[side]), len(alone[1 - side])):
                found.append(SymptomFinding(SPIKES, alone[side][0], what, first, second, side))
            elif alone[side]:
                notes.append(
                    f"spikes of the {what} in one run, from step {alone[side][0]}: {first} against {second}"
                )
    return found


def _without_match(mine: Spikes, others: Spikes) -> list[int]:
    """Return the steps of the spikes without one of the other run near; each of those matches one."""
    free = [spike for _, spike in others]
    alone = []
    for step, spike in mine:
        near = next((other for other in free if abs(other.first - spike.first) <= NEAR), None)
        if near is None:
            alone.append(step)
        else:
            free.remove(near)
    return alone


def _drift(pair: CurvePair, spikes: Sequence[Spikes]) -> list[SymptomFinding]:
    """Find the first tenth of the common steps whose mean difference is over the tolerance, without spikes."""
    every = [spike for of_run in spikes for _, spike in of_run]
    within = {pair.steps[place] for spike in every for place in range(spike.first, spike.last + 1)}
    items = [(step, value) for step, value in pair.differences().items() if step not in within]
    width = max(1, len(items) // TENTH)
    if len(items) < 2:
        return []
    sums = np.cumsum([0.0, *(value for _, value in items)])
    over = np.flatnonzero((sums[width:] - sums[:-width]) / width > TOLERANCE)
    if not len(over):
        return []
    first = next(step for step, value in items[over[0] :] if value > TOLERANCE)
    return [_of(DRIFT, next(place for place in pair.places if place.step == first))]


def differing_evaluations(pair: CurvePair) -> list[tuple[str, str, str]]:
    """Return the name and both values of each evaluation of both files that differs by over 1 % and by over chance.

    Each counts by its mean over the last tenth of the common steps. Its standard error is that of a column with stderr
    in its name, else that of the mean; where it is unknown, 1 % alone decides.
    """
    tables = [side.evaluations for side in pair.sides]
    steps = {
        name: sorted(curve.keys() & tables[1][name].keys())
        for name, curve in tables[0].items()
        if name in tables[1] and ERROR not in name
    }
    steps = {name: common[-max(1, len(common) // TENTH) :] for name, common in steps.items() if common}
    limit = NormalDist().inv_cdf(1 - CHANCE / 2 / max(1, len(steps)))
    found = []
    for name, last in steps.items():
        means = [math.fsum(table[name][step] for step in last) / len(last) for table in tables]
        errors = [_error(table, name, last) for table in tables]
        difference = abs(means[0] - means[1])
        if not math.isfinite(difference):
            differs = math.isfinite(means[0]) != math.isfinite(means[1])
        else:
            differs = difference > max(TOLERANCE * abs(means[0]), limit * math.hypot(*errors))
        if differs:
            at = f"step {last[0]}" if len(last) == 1 else f"steps {last[0]} to {last[-1]}"
            unknown = "" if all(errors) else ", error unknown"
            found.append((f"{name} at {at}{unknown}", f"{means[0]:.6g}", f"{means[1]:.6g}"))
    return found


def _error(table: dict[str, Curve], name: str, steps: Sequence[int]) -> float:
    """Return the standard error of a mean of evaluations; 0 where it is unknown."""
    known = next(
        (curve for other, curve in table.items() if ERROR in other and other.replace(ERROR, "") == name), {}
    )
    if steps[-1] in known:
        return known[steps[-1]]
    values = [table[name][step] for step in steps]
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 2 else 0.0


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
    first = diagnosis.beyond or diagnosis.unequal
    steps = [first.step] if first else []
    return min([*steps, step] if symptom == SPIKES or not steps else steps)
