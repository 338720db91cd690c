"""Compare training losses of the same run in two studies at equal iterations.

The same variant and seed has the same batches and initial weights in both, so its curves first differ by rounding and
then separate as training amplifies it. They are compared with a tolerance of one percent, and with the A/A errors:
the differences between control arms of one study at the same seed, which are noise alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ra.arms import control_arms, controls_of
from referee.verdict.statistics import mean
from runtime.metrics_log import Steps, read_steps
from study.compare.loaded_studies import LoadedStudy
from study.curves import thinned

TOLERANCE = 0.01  # relative difference of the loss
TENTH = 0.1  # of the shared iterations: the early and the late part
WINDOWS = 50  # a running mean spans 1 / WINDOWS of the shared iterations, at least SMALLEST_WINDOW
SMALLEST_WINDOW = 5
POINTS = 200  # of a curve in a figure
Curve = dict[int, float]  # iteration -> value, ascending


@dataclass(frozen=True)
class Errors:
    """Relative difference of two curves: at the first shared iteration, means over the first and the last tenth."""

    first: float
    early: float
    late: float

    @classmethod
    def largest(cls, errors: Iterable[Errors]) -> Errors:
        """Return the largest value of each part."""
        return cls(*map(max, zip(*map(dataclasses.astuple, errors), strict=True)))

    def within(self, limit: Errors) -> bool:
        """Whether every part is at most the limit's."""
        return self.first <= limit.first and self.early <= limit.early and self.late <= limit.late


@dataclass(frozen=True)
class Alignment:
    """One run in two studies."""

    studies: tuple[str, str]
    run: str
    variant: str
    seed: int
    iterations: int  # that both curves have
    errors: Errors
    control_errors: Errors | None  # the largest between two control arms of the seed; None without two arms
    differs_from: int | None  # first iteration with another loss
    parts_from: int | None  # first iteration beyond the tolerance, see `parts_at`
    unreadable: int  # lines of both metrics.jsonl
    curve: Curve  # running means at up to POINTS iterations, for a figure

    @property
    def within_tolerance(self) -> bool:
        return self.errors.within(Errors(TOLERANCE, TOLERANCE, TOLERANCE))

    @property
    def within_control_errors(self) -> bool | None:
        """Whether the errors are at most those between control arms.

        Control arms are different functions of the same weights, so they differ at the first step already. The same
        run differs there by rounding only; a larger first error means other weights or batches.
        """
        return None if self.control_errors is None else self.errors.within(self.control_errors)


def losses(steps: Steps) -> Curve:
    """Return the training loss in nats at each iteration; the last one of an iteration counts."""
    return {step.iteration: step.loss for step in steps.steps}


def relative_difference(one: Curve, other: Curve) -> Curve:
    """Return |one - other| / |one| at the shared iterations."""
    return {k: abs(one[k] - other[k]) / max(abs(one[k]), 1e-12) for k in sorted(one.keys() & other.keys())}


def summarize(difference: Curve) -> Errors:
    """Summarize a curve of at least one relative difference."""
    values = list(difference.values())
    part = max(1, round(TENTH * len(values)))
    return Errors(values[0], mean(values[:part]), mean(values[-part:]))


def running_means(difference: Curve) -> Curve:
    """Return iteration k -> mean over the full window that starts at k."""
    width = min(len(difference), max(SMALLEST_WINDOW, len(difference) // WINDOWS))
    sums = np.cumsum([0.0, *difference.values()])
    means = np.maximum(sums[width:] - sums[:-width], 0.0) / width
    return dict(zip(difference, means.tolist(), strict=False))


def parts_at(difference: Curve, limit: float) -> int | None:
    """Return the first iteration at which the value and its running mean are above the limit; None if none is."""
    means = running_means(difference)
    return next((k for k, value in means.items() if min(value, difference[k]) > limit), None)


def align(one: LoadedStudy, other: LoadedStudy) -> list[Alignment]:
    """Compare every run that counts in both studies and shares an iteration; seed by seed."""
    curves = [
        {key: read_steps(run.file(study.path, "metrics.jsonl")) for key, run in study.runs().items()}
        for study in (one, other)
    ]
    shared = sorted(curves[0].keys() & curves[1].keys(), key=lambda key: (key[1], key[0]))
    limits = {seed: _control_errors(curves, seed) for _, seed in shared}
    found = []
    for variant, seed in shared:
        a, b = (table[variant, seed] for table in curves)
        difference = relative_difference(losses(a), losses(b))
        if not difference:
            continue
        means = running_means(difference)
        found.append(
            Alignment(
                studies=(one.label, other.label),
                run=one.runs()[variant, seed].name,
                variant=variant,
                seed=seed,
                iterations=len(difference),
                errors=summarize(difference),
                control_errors=limits[seed],
                differs_from=next((k for k, value in difference.items() if value), None),
                parts_from=parts_at(difference, TOLERANCE),
                unreadable=a.damaged + b.damaged,
                curve={k: means[k] for k in thinned(list(means), POINTS)},
            )
        )
    return found


def _control_errors(curves: Sequence[Mapping[tuple[str, int], Steps]], seed: int) -> Errors | None:
    """Return the largest errors between two control arms of one study at this seed."""
    found = []
    for table in curves:
        arms = {name: losses(steps) for (name, at), steps in table.items() if at == seed}
        found += [
            summarize(difference)
            for x, y in combinations(control_arms(arms), 2)
            if y in controls_of(x, arms) and (difference := relative_difference(arms[x], arms[y]))
        ]
    return Errors.largest(found) if found else None
