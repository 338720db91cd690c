"""Compare two or more studies by their records, as far as the checklist allows. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ra.names import is_control_arm
from study.compare.alignment import Alignment, align
from study.compare.checklist import FATAL, Check, blocking, checklist
from study.compare.load import LoadedStudy, Member, read_studies
from study.compare.ranking import Across, Ranking, across, ordered, rank
from study.records.runs import BASELINE, losses
from study.report.build import common_tokens
from study.stats.statistics import Interval, mean, mean_interval

ARMS = "control arms"


@dataclass
class AbsoluteRow:
    """A variant at the last tokens at which all of its shared runs were evaluated.

    losses: one for each study; differences: of each study but the first to the first, paired by seed.
    """

    variant: str
    control: bool
    seeds: list[int]
    tokens: int
    losses: list[Interval]
    differences: list[Interval]


@dataclass
class RelativeRow:
    """A variant against the baseline of its study, paired by seed; None where a study lacks the pair."""

    variant: str
    control: bool
    against_baseline: list[Interval | None]


@dataclass
class StudyComparison:
    """The whole comparison. absolute is empty where `reasons` has an entry."""

    studies: list[LoadedStudy]
    checks: list[Check]
    reasons: list[str]
    absolute: list[AbsoluteRow]
    relative: list[RelativeRow]
    alignments: list[Alignment]
    rankings: list[Ranking]
    across: list[Across]


def build_comparison(paths: Sequence[Path]) -> StudyComparison:
    """Read the studies and compare them. CompareError where a folder is not a study."""
    studies = read_studies(paths)
    empty = [study.label for study in studies if not study.members]
    if empty:
        reasons = [f"{name} has no finished run" for name in empty]
        return StudyComparison(studies, [], reasons, [], [], [], [], [])
    checks = checklist(studies)
    reasons = _reasons(checks)
    absolute = [] if reasons else _absolute(studies)
    if not absolute and not reasons:
        reasons = ["the runs that they share were never evaluated at the same number of tokens"]
    return StudyComparison(
        studies=studies,
        checks=checks,
        reasons=reasons,
        absolute=absolute,
        relative=_relative(studies),
        alignments=[line for other in studies[1:] for line in align(studies[0], other)],
        rankings=[rank(study) for study in studies],
        across=across(studies),
    )


def _reasons(checks: list[Check]) -> list[str]:
    """Reasons against comparing losses: each fatal difference, then the entries that no record has."""
    fatal = [check for check in blocking(checks) if check.status == FATAL]
    unknown = [check.subject for check in blocking(checks) if check.status != FATAL]
    reasons = [f"{check.subject} ({' | '.join(check.values)}): {check.reason}" for check in fatal]
    if unknown:
        reasons.append(f"not recorded, so agreement cannot be shown: {', '.join(unknown)}")
    return reasons


def _absolute(studies: Sequence[LoadedStudy]) -> list[AbsoluteRow]:
    """One row for each shared variant with an evaluation in common, and one for all control arms together."""
    tables = [study.keyed() for study in studies]
    shared = set.intersection(*(set(table) for table in tables))
    names = ordered({name for name, _ in shared})
    groups = {name: [name] for name in names}
    arms = [name for name in names if is_control_arm(name)]
    if len(arms) > 1:
        groups[ARMS] = arms
    rows = [_absolute_row(name, members, tables, shared) for name, members in groups.items()]
    return [row for row in rows if row]


def _absolute_row(
    name: str,
    members: list[str],
    tables: list[dict[tuple[str, int], Member]],
    shared: set[tuple[str, int]],
) -> AbsoluteRow | None:
    """Average `members` at each seed that all of them have; None where their runs share no evaluation."""
    seeds = sorted(
        set.intersection(*({seed for variant, seed in shared if variant == one} for one in members))
    )
    runs = [[table[one, seed].run for one in members for seed in seeds] for table in tables]
    tokens = common_tokens([run for group in runs for run in group])
    if tokens is None:
        return None
    values = [
        [mean([losses(table[one, seed].record)[tokens] for one in members]) for seed in seeds]
        for table in tables
    ]
    differences = [[b - a for a, b in zip(values[0], other, strict=True)] for other in values[1:]]
    return AbsoluteRow(
        variant=name,
        control=all(is_control_arm(one) for one in members),
        seeds=seeds,
        tokens=tokens,
        losses=[mean_interval(group) for group in values],
        differences=[mean_interval(group) for group in differences],
    )


def _relative(studies: Sequence[LoadedStudy]) -> list[RelativeRow]:
    tables = [{row.variant: row for row in study.report.rows} for study in studies]
    names = ordered({name for table in tables for name in table} - {BASELINE})
    return [
        RelativeRow(
            name,
            is_control_arm(name),
            [table[name].against_baseline if name in table else None for table in tables],
        )
        for name in names
    ]


def as_json(comparison: StudyComparison) -> dict[str, Any]:
    """The comparison as plain data; the records stay where they are."""
    return {
        "schema": 1,
        "studies": [
            {
                "label": study.label,
                "path": str(study.path),
                "notes": study.notes,
                "runs": [
                    {
                        key: getattr(run, key)
                        for key in ("name", "variant", "seed", "status", "used", "why_not")
                    }
                    for run in study.report.runs
                ],
            }
            for study in comparison.studies
        ],
        "checks": [dataclasses.asdict(check) for check in comparison.checks],
        "reasons": comparison.reasons,
        "absolute": [dataclasses.asdict(row) for row in comparison.absolute],
        "relative": [dataclasses.asdict(row) for row in comparison.relative],
        "alignments": [
            dataclasses.asdict(line)
            | {"within_rule": line.within_rule, "within_envelope": line.within_envelope}
            for line in comparison.alignments
        ],
        "rankings": [dataclasses.asdict(ranking) for ranking in comparison.rankings],
        "across": [dataclasses.asdict(row) for row in comparison.across],
    }
