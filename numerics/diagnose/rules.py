"""Name the symptom of two training curves. Every rule is a line of SYMPTOMS; docs/numerics.md shows the same table."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from numerics.diagnose.loss_files import LossCurve
from numerics.diagnose.pair import LOSS, NORM, CurvePair, DifferingValue
from numerics.diagnose.spikes import LOSS as LOSS_JUMPS
from numerics.diagnose.spikes import NORM as NORM_JUMPS
from numerics.diagnose.spikes import CurveSpike, find_spikes

TOLERANCE = 0.01  # relative difference of the loss (section 1.3)
FIRST_STEPS = 5  # the first several steps
TENTH = 10  # the first steps, and a window of the running mean, are at most a tenth of the common steps
ODDS = 8  # at equal rates, an excess that counts has a probability of at most one in eight: 3 to 0, 5 to 1, 7 to 2
NEAR = 16  # logged steps within which spikes of both runs are one event
TWO_SIDED = 1.96  # standard errors

NOT_REPRODUCIBLE, OVERFLOW, FIRST_STEP = "not reproducible", "overflow or NaN", "first-step difference"
SPIKES, DRIFT, DOWNSTREAM, NONE = "spikes", "drift", "downstream only", "none"


@dataclass(frozen=True)
class Symptom:
    """A row of the table. section: of the guide, with the way to the cause."""

    name: str
    rule: str
    section: str


SYMPTOMS = {
    symptom.name: symptom
    for symptom in (
        Symptom(
            NOT_REPRODUCIBLE,
            "both runs have the same machine and settings, and a loss or gradient norm differs in any bit",
            "2.3.2",
        ),
        Symptom(
            OVERFLOW,
            "a loss or gradient norm is not finite where the other run's is, and one of these holds: the other run is "
            "finite everywhere, this run is not finite in its last steps, or this run has clearly more such steps",
            "1.3, 2.3.1.1",
        ),
        Symptom(
            FIRST_STEP,
            "the relative difference of the loss is over 1 % at the first common step, or in the mean of the first "
            "common steps (five, at most a tenth)",
            "1.3, 2.3.1.2",
        ),
        Symptom(
            SPIKES,
            "one run has clearly more spikes of the loss or gradient norm than the other, such as 3 against 0 or 5 "
            "against 1; spikes of both runs at one place do not count",
            "1.3, 2.3.1.3",
        ),
        Symptom(
            DRIFT,
            "the first steps agree, and the mean relative difference over a tenth of the common steps is over 1 % "
            "later; spikes do not count",
            "1.3, 2.3.1.3",
        ),
        Symptom(
            DOWNSTREAM,
            "none of the above, and an evaluation differs by over 1 % and, where its standard error is known, by more "
            "than 1.96 of them",
            "1.3, 2.3.2.4",
        ),
        Symptom(NONE, "no rule above applies", "1.2"),
    )
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
    """A symptom that applies. side: 0 or 1, the run that shows it; None for both. what: LOSS, NORM or an evaluation."""

    symptom: Symptom
    step: int
    evidence: str
    side: int | None = None
    what: str = LOSS


@dataclass(frozen=True)
class Diagnosis:
    """findings: the symptom first, then others that apply. unequal, beyond: see Pair."""

    pair: CurvePair
    findings: list[SymptomFinding]
    unequal: DifferingValue | None
    beyond: DifferingValue | None
    scores: list[Score] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def symptom(self) -> Symptom:
        return self.findings[0].symptom

    @property
    def finding(self) -> SymptomFinding:
        return self.findings[0]


@np.errstate(over="ignore", invalid="ignore")  # losses up to the largest float
def diagnose(pair: CurvePair, same_settings: bool = False, scores: Sequence[Score] = ()) -> Diagnosis:
    """Apply the rules. same_settings: whether machine and settings of both runs are the same."""
    unequal = pair.first_unequal()
    every = [*scores, *evaluations(pair)]
    notes = [*pair.notes, *(note for side in pair.sides for note in _reading_notes(side))]
    spikes = {what: [_spikes_of(pair, side, what) for side in (0, 1)] for what in (LOSS, NORM)}
    found = _reproducible(unequal) if same_settings and unequal else []
    found += [*_overflow(pair, notes), *_first_steps(pair)]
    if not any(finding.symptom.name == FIRST_STEP for finding in found):
        later = [*_more_spikes(pair, spikes, notes), *_drift(pair, spikes)]
        found += sorted(later, key=lambda finding: finding.step)
    if not found:
        found = _downstream(pair, every)
    found = found or [SymptomFinding(SYMPTOMS[NONE], int(pair.steps[0]), _agreement(pair, unequal))]
    return Diagnosis(pair, found, unequal, pair.first_beyond_rounding(), every, notes)


def _reading_notes(curve: LossCurve) -> list[str]:
    counts = (
        (curve.damaged, "lines without a number are left out"),
        (curve.repeated, "lines repeat a step: the last of a step counts"),
    )
    return [f"{curve.name}: {count} {text}" for count, text in counts if count]


def _agreement(pair: CurvePair, unequal: DifferingValue | None) -> str:
    steps = f"{len(pair.steps)} common step{'s' if len(pair.steps) > 1 else ''}"
    if unequal is None:
        return f"all values of {steps} are equal"
    found = list(pair.differences().values())
    return f"the losses of {steps} agree within {max(found, default=0.0):.2g}, in the mean {_mean(found):.2g}"


# -- the rules


def _reproducible(unequal: DifferingValue) -> list[SymptomFinding]:
    text = f"the same machine and settings give {unequal.first!r} and {unequal.second!r} as {unequal.what}"
    return [
        SymptomFinding(
            SYMPTOMS[NOT_REPRODUCIBLE], unequal.step, f"{text} at step {unequal.step}", None, unequal.what
        )
    ]


def _overflow(pair: CurvePair, notes: list[str]) -> list[SymptomFinding]:
    """Compare the steps with values that are not finite."""
    bad = [_not_finite(curve) for curve in pair.sides]
    alone = [
        [step for step in sorted(bad[side]) if _is_finite_near(pair.sides[1 - side], step, bad[1 - side])]
        for side in (0, 1)
    ]
    found = []
    for side, curve in enumerate(pair.sides):
        if not alone[side]:
            continue
        until_end = _last_run(curve, bad[side])
        only = not bad[1 - side]
        last = next((step for step in until_end if step in alone[side]), None)
        frequent = more_frequent(len(alone[side]), len(alone[1 - side]))
        if not (only or last is not None or frequent):
            continue
        step = alone[side][0]
        what = LOSS if not math.isfinite(curve.losses.get(step, 0.0)) else NORM
        value = (curve.losses if what == LOSS else curve.gradient_norms)[step]
        counts = f"{len(bad[side])} steps of it are not finite, {len(bad[1 - side])} of the other run"
        text = f"{curve.name}: {what} {value} at step {step}, where the other run is finite; {counts}"
        found.append(SymptomFinding(SYMPTOMS[OVERFLOW], step, text, side, what))
    if not found and (both := sorted(bad[0] & bad[1])):
        notes.append(
            f"both runs have values that are not finite, {len(both)} common steps from step {both[0]}"
        )
    return sorted(found, key=lambda finding: finding.step)


def _not_finite(curve: LossCurve) -> set[int]:
    return {
        step
        for values in (curve.losses, curve.gradient_norms)
        for step, value in values.items()
        if not math.isfinite(value)
    }


def _is_finite_near(other: LossCurve, step: int, bad: set[int]) -> bool:
    """Whether a curve is finite at a step; where it has no value there, at the values before and after."""
    if step in other.losses:
        return step not in bad
    steps = other.steps
    place = bisect.bisect(steps, step)
    return 0 < place < len(steps) and not {steps[place - 1], steps[place]} & bad


def _last_run(curve: LossCurve, bad: set[int]) -> list[int]:
    """Return the last logged steps of a curve, as far as they are not finite."""
    run = list(itertools.takewhile(lambda step: step in bad, reversed(curve.steps)))
    return run[::-1]


def more_frequent(count: int, other: int) -> bool:
    """Whether count events against other ones have a probability of at most 1 / ODDS at equal rates.

    Given the sum, the count is binomial with 1/2 (Przyborowski and Wilenski 1940).
    """
    total = count + other
    if total > 1000:  # the normal approximation
        return count - other > 1.15 * math.sqrt(total)
    return ODDS * sum(math.comb(total, k) for k in range(count, total + 1)) <= (1 << total)


def _first_steps(pair: CurvePair) -> list[SymptomFinding]:
    differences = list(pair.differences().items())
    if not differences:
        return []
    first = differences[: max(1, min(FIRST_STEPS, len(differences) // TENTH))]
    step, size = differences[0]
    average = _mean([value for _, value in first])
    if size > TOLERANCE:
        text = f"the losses differ by {_percent(size)} at the first common step, {step}"
        return [SymptomFinding(SYMPTOMS[FIRST_STEP], step, text)]
    if average > TOLERANCE:
        step = next(step for step, value in first if value > TOLERANCE)
        text = f"the losses of the first {len(first)} common steps differ by {_percent(average)} in the mean"
        return [SymptomFinding(SYMPTOMS[FIRST_STEP], step, text)]
    return []


Spikes = dict[str, list[list[tuple[int, CurveSpike]]]]  # LOSS or NORM -> of each run: step and spike


def _spikes_of(pair: CurvePair, side: int, what: str) -> list[tuple[int, CurveSpike]]:
    curve = pair.sides[side]
    values = curve.losses if what == LOSS else curve.gradient_norms
    other = pair.sides[1 - side].gradient_norms
    steps = [step for step in pair.steps.tolist() if what == LOSS or (step in values and step in other)]
    found = find_spikes(
        np.array([values[step] for step in steps]), LOSS_JUMPS if what == LOSS else NORM_JUMPS
    )
    return [(steps[spike.first], spike) for spike in found]


def _more_spikes(pair: CurvePair, spikes: Spikes, notes: list[str]) -> list[SymptomFinding]:
    found = []
    for what in (LOSS, NORM):
        alone = [_without_match(spikes[what][side], spikes[what][1 - side]) for side in (0, 1)]
        for side, mine in enumerate(alone):
            counts = [len(of_run) for of_run in spikes[what]]
            if not mine:
                continue
            step, spike = mine[0]
            others = f"{len(alone[1 - side])} only in the other"
            text = (
                f"{pair.sides[side].name}: {counts[side]} spikes of the {what}, {counts[1 - side]} in the other run; "
                f"{len(mine)} only in this run, {others}; the first at step {step}: {spike.value:.4g}, "
                f"expected {spike.expected:.4g}"
            )
            if more_frequent(len(mine), len(alone[1 - side])):
                found.append(SymptomFinding(SYMPTOMS[SPIKES], step, text, side, what))
            else:
                notes.append(f"{text}; so few can be chance")
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
    differences = pair.differences()
    steps = pair.steps.tolist()
    within = {
        steps[place]
        for of_run in spikes[LOSS]
        for _, spike in of_run
        for place in range(spike.first, spike.last + 1)
    }
    items = [(step, value) for step, value in differences.items() if step not in within]
    width = max(1, len(items) // TENTH)
    if len(items) < 2:
        return []
    values = np.array([value for _, value in items])
    sums = np.cumsum([0.0, *values])
    means = (sums[width:] - sums[:-width]) / width
    over = np.flatnonzero(means > TOLERANCE)
    if not len(over):
        return []
    place = next(place for place in range(over[0], len(items)) if values[place] > TOLERANCE)
    first = items[place][0]
    for of_run in spikes[LOSS]:  # a jump whose level stays apart
        first = min([first, *(step for step, spike in of_run if steps.index(first) == spike.last + 1)])
    text = (
        f"the losses agree at first ({_percent(values[0])}) and differ by over 1 % from step {first}; "
        f"{_percent(float(means[-1]))} in the mean of the last {width} common steps, {_percent(float(means.max()))} "
        "at most"
    )
    signed = (pair.losses(1) - pair.losses(0))[-width:]
    if width > 4 and abs(signed.sum()) < np.abs(signed).sum() / math.sqrt(width):
        text += "; its sign changes, as with other batches or seeds"
    return [SymptomFinding(SYMPTOMS[DRIFT], first, text)]


def evaluations(pair: CurvePair) -> list[Score]:
    """Return the evaluations of both files: of one name, at their last common step."""
    found = []
    for name, first in pair.first.evaluations.items():
        second = pair.second.evaluations.get(name, {})
        if common := first.keys() & second.keys():
            found.append(Score(f"{name} at step {max(common)}", first[max(common)], second[max(common)]))
    return found


def _downstream(pair: CurvePair, scores: Sequence[Score]) -> list[SymptomFinding]:
    last = int(pair.steps[-1])
    return [
        SymptomFinding(
            SYMPTOMS[DOWNSTREAM],
            last,
            f"the losses agree, and {score.name} is {score.first:.6g} against {score.second:.6g} "
            f"({_percent(score.relative)})",
            None,
            score.name,
        )
        for score in scores
        if score.differs
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"
