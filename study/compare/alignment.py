"""Compare the training losses of the same run in two studies at equal iterations.

The same variant and seed sees the same batches from the same weights, so its two curves differ by rounding at first
and drift apart as training amplifies it. There are two limits: one percent, and the spread of the control arms of one
study at the same seed (the A/A envelope), which differ by noise alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

from ra.names import is_control_arm
from study.compare.load import LoadedStudy, TrainingCurve, read_curve
from study.stats.statistics import mean

RULE = 0.01  # relative error of the loss
SHARE = 0.1  # of the shared iterations, in the early and in the late part
WINDOWS = 50  # running means are over a fiftieth of the shared iterations, at least SMALLEST
SMALLEST = 5
POINTS = 200  # of a curve in a figure
Curve = dict[int, float]


@dataclass(frozen=True)
class Errors:
    """Relative difference of two curves: at the first shared iteration, mean over the first and last tenth."""

    first: float
    early: float
    late: float


@dataclass(frozen=True)
class Alignment:
    """One run in two studies. errors |a - b| / a; parts_...: see `parts_at`.

    envelope: the largest errors between two control arms of one seed, in either study; None without two arms.
    curve, envelope_curve: running means at up to POINTS iterations, for a figure.
    """

    studies: tuple[str, str]
    run: str
    variant: str
    seed: int
    iterations: int
    errors: Errors
    envelope: Errors | None
    parts_from_rule: int | None
    parts_from_envelope: int | None
    unreadable: int
    curve: Curve
    envelope_curve: Curve

    @property
    def within_rule(self) -> bool:
        return max(self.errors.first, self.errors.early, self.errors.late) <= RULE

    @property
    def within_envelope(self) -> bool | None:
        """Whether the two runs differ by no more than control arms: at the first step, early and late.

        Control arms are different functions of the same weights, so they differ at the first step. Two runs of one
        function on the same batch differ there by rounding alone. A larger difference means other weights or batches.
        """
        if self.envelope is None:
            return None
        return all(
            getattr(self.errors, part) <= getattr(self.envelope, part) for part in ("first", "early", "late")
        )


def relative(one: Curve, other: Curve) -> Curve:
    """|one - other| / |one| at the iterations that both have."""
    shared = sorted(one.keys() & other.keys())
    return {k: abs(one[k] - other[k]) / max(abs(one[k]), 1e-12) for k in shared}


def errors(difference: Curve) -> Errors:
    """Summarize relative differences at one or more iterations."""
    values = [difference[k] for k in sorted(difference)]
    part = max(1, round(SHARE * len(values)))
    return Errors(values[0], mean(values[:part]), mean(values[-part:]))


def running(difference: Curve) -> Curve:
    """Iteration k -> mean over the window that begins at k, for full windows only."""
    places = sorted(difference)
    width = min(len(places), max(SMALLEST, len(places) // WINDOWS))
    sums = [0.0, *accumulate(difference[k] for k in places)]
    return {places[n]: max(sums[n + width] - sums[n], 0.0) / width for n in range(len(places) - width + 1)}


def parts_at(difference: Curve, limit: Curve | float) -> int | None:
    """The first iteration at which the difference and the mean of its window exceed the limit; None without one.

    A limit that is a curve applies where it has a point.
    """
    for k, value in running(difference).items():
        bound = limit if isinstance(limit, float) else limit.get(k)
        if bound is not None and min(value, difference[k]) > bound:
            return k
    return None


def align(one: LoadedStudy, other: LoadedStudy) -> list[Alignment]:
    """Align each run that counts in both studies and shares an iteration, seed by seed."""
    left, right = one.keyed(), other.keyed()
    shared = sorted(left.keys() & right.keys(), key=lambda key: (key[1], key[0]))
    curves = {
        (study.label, key): read_curve(member.run.file(study.path, "metrics.jsonl"))
        for study, members in ((one, left), (other, right))
        for key, member in members.items()
    }
    envelopes = {
        seed: _envelope([_arms(study, curves, seed) for study in (one, other)])
        for seed in {seed for _, seed in shared}
    }
    found = []
    for variant, seed in shared:
        a, b = (curves[study.label, (variant, seed)] for study in (one, other))
        difference = relative(a.losses, b.losses)
        if not difference:
            continue
        widest, highest = envelopes[seed]
        found.append(
            Alignment(
                studies=(one.label, other.label),
                run=left[variant, seed].run.name,
                variant=variant,
                seed=seed,
                iterations=len(difference),
                errors=errors(difference),
                envelope=widest,
                parts_from_rule=parts_at(difference, RULE),
                parts_from_envelope=parts_at(difference, highest),
                unreadable=a.unreadable + b.unreadable,
                curve=thinned(running(difference)),
                envelope_curve=thinned(highest),
            )
        )
    return found


def _arms(
    study: LoadedStudy, curves: dict[tuple[str, tuple[str, int]], TrainingCurve], seed: int
) -> list[Curve]:
    """The curves of the study's control arms at a seed."""
    keys = [key for key in study.keyed() if key[1] == seed and is_control_arm(key[0])]
    return [curves[study.label, key].losses for key in keys]


def _envelope(arms: Sequence[Sequence[Curve]]) -> tuple[Errors | None, Curve]:
    """The largest errors, and at each iteration the largest running mean, of any two arms of one study."""
    pairs = [pair for curves in arms for x, y in combinations(curves, 2) if (pair := relative(x, y))]
    if not pairs:
        return None, {}
    found = [errors(pair) for pair in pairs]
    widest = Errors(max(e.first for e in found), max(e.early for e in found), max(e.late for e in found))
    highest: Curve = {}
    for pair in pairs:
        for k, value in running(pair).items():
            highest[k] = max(highest.get(k, 0.0), value)
    return widest, highest


def thinned(curve: Curve) -> Curve:
    """At most POINTS of the points, evenly spaced, with the first and the last."""
    places = sorted(curve)
    if len(places) <= POINTS:
        return curve
    chosen = [places[round(n * (len(places) - 1) / (POINTS - 1))] for n in range(POINTS)]
    return {k: curve[k] for k in chosen}
