"""Name the symptom of two training curves, by the rules of the table in docs/diagnose.md."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from referee.errors import NumericsError
from referee.numerics.diagnose.spikes import LOSS as LOSS_JUMPS
from referee.numerics.diagnose.spikes import NORM as NORM_JUMPS
from referee.numerics.diagnose.spikes import CurveSpike, find_spikes
from referee.numerics.rows import TableRow
from referee.verdict.loss_files import Curve, LossCurve

# Two curves at their common steps: alignment of step numbers, differences, and what rounding explains.


LOSS, NORM = "loss", "gradient norm"
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}
# Growth of a difference within one step that rounding explains. Measured between correct kernels: 4.3 where training is
# stable; 15 (loss) and 99 (gradient norm) with a learning rate ten times too large (docs/diagnose.md).
GROWTH = {LOSS: 16.0, NORM: 256.0}
CLEARER = 10.0  # times closer must the curves be for a shift of their step numbers
LARGEST = 1e100  # relative difference; means of it are finite
DIGITS = 500  # values that show how many digits the file has


@dataclass(frozen=True)
class DifferingValue:
    """A common value of both curves."""

    step: int
    what: str  # LOSS or NORM
    first: float
    second: float
    relative: float  # the difference; 0 where both are equal, infinite where one is not a number


@dataclass(frozen=True)
class CurvePair:
    """Two curves and their common steps."""

    first: LossCurve
    second: LossCurve
    steps: list[int]
    epsilon: float = EPSILON["float32"]
    offset: int = 0  # added to the steps of the second curve
    notes: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[LossCurve, LossCurve]:
        return self.first, self.second

    def differences(self) -> dict[int, float]:
        """Return step -> |first - second| / |first| of the loss, where both are finite."""
        return {
            place.step: place.relative
            for place in self.places
            if place.what == LOSS and math.isfinite(place.first) and math.isfinite(place.second)
        }

    @functools.cached_property
    def places(self) -> list[DifferingValue]:
        """Every common value in the order of computation: the loss of a step, then its gradient norm.

        The divisor of losses around zero, as of a policy gradient, is at least their median size.
        """
        found = []
        norms = [side.gradient_norms for side in self.sides]
        losses = [loss for loss in self.first.losses.values() if math.isfinite(loss)]
        has_both_signs = losses and min(losses) < 0 < max(losses)
        floor = float(np.median(np.abs(losses))) if has_both_signs else 0.0
        for step in self.steps:
            found.append(_place(step, LOSS, self.first.losses[step], self.second.losses[step], floor))
            if step in norms[0] and step in norms[1]:
                found.append(_place(step, NORM, norms[0][step], norms[1][step]))
        return found

    def first_unequal(self) -> DifferingValue | None:
        """Return the first value that is not equal to the last bit, or the last digit of the file."""
        return next((place for place in self.places if place.relative), None)

    def first_beyond_rounding(self) -> DifferingValue | None:
        """Return the first value that differs by more than rounding and its growth explain."""
        return next((place for place, explained in self.explained() if place.relative > explained), None)

    def explained(self) -> Iterator[tuple[DifferingValue, float]]:
        """Yield every common value and the relative difference that rounding explains.

        It is GROWTH^g x (epsilon + the largest difference before), for g steps since the last common one, and one unit
        of the last digit in the file.
        """
        largest, last = 0.0, self.steps[0] - 1
        quantum = {
            LOSS: _quantum([side.losses for side in self.sides]),
            NORM: _quantum([side.gradient_norms for side in self.sides]),
        }
        for place in self.places:
            gap = max(1, place.step - last)
            growth = math.exp(min(700.0, gap * math.log(GROWTH[place.what])))
            size = abs(place.first) if math.isfinite(place.first) else math.inf
            digits = 1.01 * quantum[place.what] / max(size, 1e-300)
            yield place, growth * (self.epsilon + largest) + digits
            if math.isfinite(place.relative):
                largest = max(largest, place.relative)
            last = place.step


def pair_curves(
    first: LossCurve, second: LossCurve, offset: int | None = None, epsilon: float = EPSILON["float32"]
) -> CurvePair:
    """Pair two curves. NumericsError without a common step.

    offset: to add to the steps of the second curve. By default it is 0, or 1 or -1 where one trainer counts steps from
    0 and the other from 1: where the curves are far closer so.
    """
    counts = [len(side.losses) for side in (first, second)]
    notes = [
        f"{side.name} has no step numbers: its lines count as steps 1 to {len(side.losses)}"
        for side in (first, second)
        if not side.numbered and counts[0] != counts[1]
    ]
    if offset is None:
        distances = {shift: _distance(first, second.shifted(shift)) for shift in (0, 1, -1)}
        best = min(distances, key=lambda shift: distances[shift])
        offset = best if CLEARER * distances[best] < distances[0] else 0
        if offset:
            notes.append(
                f"the steps of {second.name} are shifted by {offset:+d}, where the curves agree best"
            )
    second = second.shifted(offset) if offset else second
    steps = sorted(first.losses.keys() & second.losses.keys())
    if not steps:
        ranges = [f"{side.steps[0]} to {side.steps[-1]}" for side in (first, second)]
        raise NumericsError(
            f"the curves have no common step: {ranges[0]} against {ranges[1]}; fix: log both at the same steps, "
            "or give --offset"
        )
    if {*counts} != {len(steps)}:
        notes.append(
            f"{len(steps)} common steps, {steps[0]} to {steps[-1]}, of {counts[0]} and {counts[1]} logged ones"
        )
    return CurvePair(first, second, steps, epsilon, offset, tuple(notes))


def _distance(first: LossCurve, second: LossCurve) -> float:
    """Return the median relative difference at the first common steps; infinite without three of them."""
    steps = sorted(first.losses.keys() & second.losses.keys())[:100]
    found = [_place(step, LOSS, first.losses[step], second.losses[step]).relative for step in steps]
    enough = len(found) > 2 or (found and first.losses.keys() == second.losses.keys())
    return float(np.median(found)) if enough else math.inf


def _place(step: int, what: str, first: float, second: float, floor: float = 0.0) -> DifferingValue:
    if first == second or (math.isnan(first) and math.isnan(second)):
        return DifferingValue(step, what, first, second, 0.0)
    if not (math.isfinite(first) and math.isfinite(second)):
        return DifferingValue(step, what, first, second, math.inf)
    size = max(abs(first), floor, 1e-300)
    return DifferingValue(step, what, first, second, min(abs(first - second) / size, LARGEST))


def _quantum(curves: Sequence[Curve]) -> float:
    """Return the unit of the last printed digit; 0 for values of full precision."""
    return max((_unit(list(curve.values())[:DIGITS]) for curve in curves), default=0.0)


def _unit(values: Sequence[float]) -> float:
    texts = [f"{value:.15g}" for value in values if math.isfinite(value)]
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    full = not decimals or any("e" in text or len(text) > 14 for text in texts)
    return 0.0 if full else 10.0**-decimals


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
