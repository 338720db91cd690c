"""Name the symptom of two training curves, by the rules of the table in docs/diagnose.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from referee.errors import NumericsError
from referee.numerics.diagnose.spikes import LOSS as LOSS_JUMPS
from referee.numerics.diagnose.spikes import NORM as NORM_JUMPS
from referee.numerics.diagnose.spikes import CurveSpike, find_spikes
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

    first: LossCurve
    second: LossCurve
    steps: list[int]
    values: list[CommonValue]  # in the order of computation: the loss of a step, then its gradient norm
    offset: int = 0  # added to the steps of the second curve
    notes: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[LossCurve, LossCurve]:
        return self.first, self.second

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


def pair_curves(
    first: LossCurve, second: LossCurve, offset: int | None = None, epsilon: float = EPSILON["float32"]
) -> CurvePair:
    """Pair two curves. NumericsError without a common step.

    offset: to add to the steps of the second curve. By default it is 0, or 1 or -1 where one curve begins at step 0,
    the other at step 1, and they are far closer so.
    """
    counts = [len(side.losses) for side in (first, second)]
    notes = [
        f"{side.name} has no step numbers: its lines count as steps 1 to {len(side.losses)}"
        for side in (first, second)
        if not side.numbered and counts[0] != counts[1]
    ]
    if offset is None:
        shift = first.steps[0] - second.steps[0] if {first.steps[0], second.steps[0]} == {0, 1} else 0
        closer = CLEARER * _distance(first, second.shifted(shift)) < _distance(first, second)
        offset = shift if closer else 0
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
    values = _common_values((first, second), steps, epsilon)
    return CurvePair(first, second, steps, values, offset, (*notes, *_reading_notes(first, second)))


def _reading_notes(*curves: LossCurve) -> list[str]:
    texts = {
        "damaged": "lines without a number are left out",
        "repeated": "lines repeat a step: the last counts",
    }
    return [
        f"{curve.name}: {count} {text}"
        for curve in curves
        for name, text in texts.items()
        if (count := getattr(curve, name))
    ]


def _distance(first: LossCurve, second: LossCurve) -> float:
    """Return the median relative difference at the first common steps; infinite without three of them."""
    steps = sorted(first.losses.keys() & second.losses.keys())[:100]
    pairs = [(first.losses[step], second.losses[step]) for step in steps]
    found = [_relative(mine, other, max(abs(mine), 1e-300)) for mine, other in pairs]
    enough = len(found) > 2 or (found and first.losses.keys() == second.losses.keys())
    return float(np.median(found)) if enough else math.inf


TOLERANCE = 0.01  # relative difference of the loss (section 1.3)
FIRST_STEPS = 5  # the first several steps
TENTH = 10  # the first steps, and a window of the running mean, are at most a tenth of the common steps
ODDS = 8  # at equal rates, an excess that counts has a probability of at most one in eight: 3 to 0, 5 to 1, 7 to 2
NEAR = 16  # steps within which spikes of both runs are one event
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
        unequal, beyond = self.pair.unequal, self.pair.beyond
        values = {"first unequal": unequal if unequal != beyond else None, "first beyond rounding": beyond}
        return rows + [
            TableRow(
                name,
                value.what,
                f"step {value.step}",
                f"{value.second:.9g}",
                f"{value.first:.9g}",
                value.relative,
                value.explained,
            )
            for name, value in values.items()
            if value
        ]


@np.errstate(over="ignore", invalid="ignore")  # losses up to the largest float
def diagnose(pair: CurvePair, same_settings: bool = False) -> Diagnosis:
    """Apply the rules in the order of SYMPTOMS. same_settings: whether both runs have the same machine and settings."""
    unequal, beyond, notes = pair.unequal, pair.beyond, [*pair.notes]
    found = [_of(NOT_REPRODUCIBLE, unequal)] if same_settings and unequal else []
    found += [*_overflow(pair, notes), *_first_steps(pair)]
    if not any(finding.symptom == FIRST_STEP for finding in found):
        spikes = {what: _spikes_of(pair, what) for what in (LOSS, NORM)}
        later = [*_more_spikes(spikes), *_drift(pair, spikes[LOSS])]
        found += sorted(later, key=lambda finding: finding.step)
    parted = differing_evaluations(pair)
    notes += [f"{name}: {first} against {second}" for name, first, second in parted if found]
    found = found or [SymptomFinding(DOWNSTREAM, pair.steps[-1], *texts) for texts in parted]
    if not found:
        small = _of(BEYOND, beyond) if beyond else _of(ROUNDING, unequal) if unequal else None
        found = [small or SymptomFinding(EQUAL, pair.steps[0])]
    return Diagnosis(pair, found, notes)


def _of(symptom: str, value: CommonValue) -> SymptomFinding:
    return SymptomFinding(symptom, value.step, value.what, f"{value.first!r}", f"{value.second!r}")


# -- the rules


def _overflow(pair: CurvePair, notes: list[str]) -> list[SymptomFinding]:
    """Find a run with a loss or norm that is not finite in steps where the other run's is.

    It counts where the last step is one of them, or the other run has no such step or clearly fewer.
    """
    bad: list[dict[int, str]] = [{}, {}]  # of each run: step -> loss or norm
    for value in pair.values:
        for side, number in enumerate((value.first, value.second)):
            if not math.isfinite(number):
                bad[side].setdefault(value.step, value.what)
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
    losses = pair.losses
    first = losses[: max(1, min(FIRST_STEPS, len(losses) // TENTH))]
    if (
        not first
        or max(first[0].relative, math.fsum(loss.relative for loss in first) / len(first)) <= TOLERANCE
    ):
        return []
    return [_of(FIRST_STEP, next(loss for loss in first if loss.relative > TOLERANCE))]


def _spikes_of(pair: CurvePair, what: str) -> list[list[CurveSpike]]:
    """Return the spikes of each side; their positions are common steps."""
    values = [value for value in pair.values if value.what == what]
    jumps = LOSS_JUMPS if what == LOSS else NORM_JUMPS
    sides = ([value.first for value in values], [value.second for value in values])
    return [
        [replace(spike, first=values[spike.first].step, last=values[spike.last].step) for spike in found]
        for found in (find_spikes(np.array(side), jumps) for side in sides)
    ]


def _more_spikes(spikes: dict[str, list[list[CurveSpike]]]) -> list[SymptomFinding]:
    """Find a run with clearly more spikes; the first is the first without a spike of the other run near."""
    found = []
    for what, sides in spikes.items():
        first, second = (f"{len(steps)} spikes" for steps in sides)
        for side in (0, 1):
            mine, others = sides[side], sides[1 - side]
            if more_frequent(len(mine), len(others)):
                alone = [
                    one.first for one in mine if all(abs(one.first - two.first) > NEAR for two in others)
                ]
                step = next(iter(alone), mine[0].first)
                found.append(SymptomFinding(SPIKES, step, what, first, second, side))
    return found


def _drift(pair: CurvePair, spikes: Sequence[Sequence[CurveSpike]]) -> list[SymptomFinding]:
    """Find the first tenth of the common steps whose mean difference is over the tolerance, without spikes."""
    within = [range(spike.first, spike.last + 1) for of_run in spikes for spike in of_run]
    losses = [loss for loss in pair.losses if not any(loss.step in steps for steps in within)]
    width = max(1, len(losses) // TENTH)
    if len(losses) < 2:
        return []
    sums = np.cumsum([0.0, *(loss.relative for loss in losses)])
    over = np.flatnonzero((sums[width:] - sums[:-width]) / width > TOLERANCE)
    later = losses[over[0] :] if len(over) else []
    return [_of(DRIFT, loss) for loss in later if loss.relative > TOLERANCE][:1]


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
    first = diagnosis.pair.beyond or diagnosis.pair.unequal
    assert first is not None
    return min(first.step, step) if symptom == SPIKES else first.step
