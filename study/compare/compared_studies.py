"""Compare two or more studies from their records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from ra.arms import control_arms, control_groups, controls_of, parse_arm
from referee.numerics.setup.checklist_rows import EQUAL, ChecklistRow
from referee.verdict.statistics import Interval, mean, mean_interval
from runtime.metrics_log import Step, read_steps
from runtime.records import Task
from study.analysis.verdict import BETTER, NO_ANSWER, WORSE
from study.compare.compare_sizes import SizeComparison, compare_sizes
from study.compare.loaded_studies import LoadedStudy, read_studies
from study.compare.study_checklist import checklist
from study.curves import thinned
from study.runs import final_values, variant_order

# Compare training losses of the same run in two studies at equal iterations.
#
# The same variant and seed has the same batches and initial weights in both, so its curves first differ by rounding and
# then separate as training amplifies it. They are compared with a tolerance of one percent, and with the A/A errors:
# the differences between control arms of one study at the same seed, which are noise alone.


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


def losses(steps: Sequence[Step]) -> Curve:
    """Return the training loss in nats at each iteration; the last one of an iteration counts."""
    return {step.iteration: step.loss for step in steps}


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
                curve={k: means[k] for k in thinned(list(means), POINTS)},
            )
        )
    return found


def _control_errors(curves: Sequence[Mapping[tuple[str, int], Sequence[Step]]], seed: int) -> Errors | None:
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


# Whether studies agree on a variant.
AGREE = "agree"
CONTRADICT = "contradict each other"
SOME = "no contradiction"
NONE = "no study can tell"
ALONE = "-"  # fewer than two studies have it


def verdict_agreement(words: Sequence[str]) -> str:
    """Whether the verdicts of studies on one variant agree."""
    if len(words) < 2:
        return ALONE
    if {BETTER, WORSE} <= set(words):
        return CONTRADICT
    if set(words) <= set(NO_ANSWER):
        return NONE
    return AGREE if len(set(words)) == 1 else SOME


ARMS = "control arms"


@dataclass
class AbsoluteRow:
    """A variant at the end of its schedule, which is the same in every study."""

    variant: str
    control: bool
    seeds: list[int]
    losses: list[Interval]  # nats, one for each study
    differences: list[Interval]  # to the first study, paired by seed, one for each later study


@dataclass
class RelativeRow:
    """A variant minus the control arms of its study, paired by seed; None where a study lacks one of them."""

    variant: str
    control: bool
    against_controls: list[Interval | None]


@dataclass
class StudyComparison:
    """All results. Without a finished run in every study only `studies` and `reasons` are known."""

    studies: list[LoadedStudy]
    reasons: list[str]  # why losses cannot be compared; `absolute` is empty then
    checks: list[ChecklistRow] = field(default_factory=list)
    absolute: list[AbsoluteRow] = field(default_factory=list)
    relative: list[RelativeRow] = field(default_factory=list)
    alignments: list[Alignment] = field(default_factory=list)
    sizes: SizeComparison | None = None  # where the studies differ in model size

    @property
    def task(self) -> Task:
        """What the studies train."""
        return self.studies[0].task

    def changes(self) -> list[tuple[str, Sequence[Interval | None]]]:
        """Variant and changes of the main table: to the first study, or to each study's control arms."""
        if self.absolute:
            return [(row.variant, row.differences) for row in self.absolute]
        return [(row.variant, row.against_controls) for row in self.relative]


def build_comparison(paths: Sequence[Path]) -> StudyComparison:
    """Read and compare studies. UserError if a path is not a study."""
    studies = read_studies(paths)
    empty = [f"{study.label} has no finished run" for study in studies if not study.report.used]
    if empty:
        return StudyComparison(studies, empty)
    checks = checklist(studies)
    reasons = [f"{one.subject} ({' | '.join(one.values)}): {one.reason}" for one in checks if one.blocks]
    excluded = {check.excludes for check in checks if check.status != EQUAL}
    absolute = [] if reasons else _absolute(studies, excluded)
    if not absolute and not reasons:
        reasons = ["the studies share no run"]
    if studies[0].task == "grpo":
        return StudyComparison(studies, reasons, checks, absolute)
    return StudyComparison(
        studies=studies,
        reasons=reasons,
        checks=checks,
        absolute=absolute,
        relative=_relative(studies),
        alignments=[line for other in studies[1:] for line in align(studies[0], other)],
        sizes=compare_sizes(studies),
    )


def _absolute(studies: Sequence[LoadedStudy], excluded: set[str]) -> list[AbsoluteRow]:
    """Return a row for each shared variant that is not excluded, and one for the mean of the control arms.

    The checklist has shown that the runs of a variant made the same updates in every study.
    """
    tables = [final_values(study.used) for study in studies]
    names = sorted(set.intersection(*map(set, tables)) - excluded, key=variant_order)
    arms = next(iter(control_groups(names)), [])
    groups = {name: [name] for name in names} | ({ARMS: arms} if len(arms) > 1 else {})
    rows = []
    for name, variants in groups.items():
        seeds = sorted(set.intersection(*(set(table[one]) for table in tables for one in variants)))
        if not seeds:
            continue
        values = [[mean([table[one][seed] for one in variants]) for seed in seeds] for table in tables]
        differences = [[b - a for a, b in zip(values[0], later, strict=True)] for later in values[1:]]
        control = parse_arm(variants[0]).is_control
        rows.append(
            AbsoluteRow(
                name, control, seeds, [*map(mean_interval, values)], [*map(mean_interval, differences)]
            )
        )
    return rows


def _relative(studies: Sequence[LoadedStudy]) -> list[RelativeRow]:
    tables = [{row.variant: row.against_controls for row in study.report.rows} for study in studies]
    names = sorted({name for table in tables for name, one in table.items() if one}, key=variant_order)
    return [
        RelativeRow(name, parse_arm(name).is_control, [table.get(name) for table in tables]) for name in names
    ]


def as_json(comparison: StudyComparison) -> dict[str, Any]:
    """Return the comparison as plain data, without the records."""
    run_fields = ("name", "variant", "seed", "status", "used", "why_not")
    studies = [
        {
            "label": study.label,
            "path": str(study.path),
            "experiment": study.report.experiment.text,
            "notes": study.notes,
            "runs": [{key: getattr(run, key) for key in run_fields} for run in study.report.runs],
            "verdicts": [dataclasses.asdict(verdict) for verdict in study.report.verdicts],
        }
        for study in comparison.studies
    ]
    value: dict[str, Any] = {"schema": 2, "studies": studies, "reasons": comparison.reasons}
    for part in ("checks", "absolute", "relative", "alignments"):
        value[part] = [dataclasses.asdict(row) for row in getattr(comparison, part)]
    if comparison.sizes:
        value["sizes"] = dataclasses.asdict(comparison.sizes)
    return value
