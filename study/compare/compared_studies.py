"""Compare two or more studies from their records. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ra.names import is_control_arm
from referee.numerics.setup.checklist_rows import FATAL, ChecklistRow
from referee.verdict.statistics import Interval, mean, mean_interval
from study.compare.alignment import Alignment, align
from study.compare.compare_sizes import SizeComparison, compare_sizes
from study.compare.compare_sizes import as_json as sizes_json
from study.compare.loaded_studies import LoadedStudy, read_studies
from study.compare.ranking import Across, Ranking, across, rank
from study.compare.study_checklist import checklist
from study.runs import losses, variant_order

ARMS = "control arms"


@dataclass
class AbsoluteRow:
    """A variant at the last token count at which all of its shared runs were evaluated.

    losses: in nats, one for each study. differences: to the first study, paired by seed, one for each later study.
    """

    variant: str
    control: bool
    seeds: list[int]
    tokens: int
    losses: list[Interval]
    differences: list[Interval]


@dataclass
class RelativeRow:
    """A variant minus the control arms of its own study, paired by seed; None where a study lacks one of them."""

    variant: str
    control: bool
    against_controls: list[Interval | None]


@dataclass
class StudyComparison:
    """All results. reasons: why losses cannot be compared; `absolute` is empty then."""

    studies: list[LoadedStudy]
    checks: list[ChecklistRow]
    reasons: list[str]
    absolute: list[AbsoluteRow]
    relative: list[RelativeRow]
    alignments: list[Alignment]
    rankings: list[Ranking]
    across: list[Across]
    sizes: SizeComparison | None = None  # where the studies differ in model size

    def pairs(self) -> dict[str, list[Alignment]]:
        """The runs of the first study and each other one, by the names of both."""
        first, *others = (study.label for study in self.studies)
        return {
            f"{first} and {other}": [line for line in self.alignments if line.studies == (first, other)]
            for other in others
        }

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
        return StudyComparison(studies, [], empty, [], [], [], [], [])
    checks = checklist(studies)
    reasons = _reasons(checks)
    absolute = [] if reasons else _absolute(studies, {check.excludes for check in checks})
    if not absolute and not reasons:
        reasons = ["the shared runs were never evaluated at the same number of tokens"]
    return StudyComparison(
        studies=studies,
        checks=checks,
        reasons=reasons,
        absolute=absolute,
        relative=_relative(studies),
        alignments=[line for other in studies[1:] for line in align(studies[0], other)],
        rankings=[rank(study) for study in studies],
        across=across(studies),
        sizes=compare_sizes(studies),
    )


def _reasons(checks: list[ChecklistRow]) -> list[str]:
    """Return why losses cannot be compared: fatal differences, then missing entries."""
    blocks = [check for check in checks if check.blocks]
    reasons = [
        f"{one.subject} ({' | '.join(one.values)}): {one.reason}" for one in blocks if one.status == FATAL
    ]
    unknown = [check.subject for check in blocks if check.status != FATAL]
    if unknown:
        reasons.append(f"not recorded, so agreement cannot be shown: {', '.join(unknown)}")
    return reasons


def _absolute(studies: Sequence[LoadedStudy], excluded: set[str]) -> list[AbsoluteRow]:
    """Return a row for each shared variant that is not excluded, and one for the mean of the control arms."""
    tables = [study.runs() for study in studies]
    shared = {key for key in set.intersection(*map(set, tables)) if key[0] not in excluded}
    names = sorted({name for name, _ in shared}, key=variant_order)
    arms = [name for name in names if is_control_arm(name)]
    groups = {name: [name] for name in names} | ({ARMS: arms} if len(arms) > 1 else {})
    rows = []
    for name, variants in groups.items():
        seeds = sorted(
            seed
            for seed in {seed for _, seed in shared}
            if shared.issuperset((one, seed) for one in variants)
        )
        # by study, seed and variant: tokens -> loss
        curves = [
            [[losses(table[one, seed].record) for one in variants] for seed in seeds] for table in tables
        ]
        evaluated = [set(curve) for study in curves for seed in study for curve in seed]
        tokens = max(set.intersection(*evaluated), default=0) if evaluated else 0
        if tokens:
            values = [[mean([curve[tokens] for curve in seed]) for seed in study] for study in curves]
            differences = [[b - a for a, b in zip(values[0], study, strict=True)] for study in values[1:]]
            control = is_control_arm(variants[0])
            means, changes = map(mean_interval, values), map(mean_interval, differences)
            rows.append(AbsoluteRow(name, control, seeds, tokens, list(means), list(changes)))
    return rows


def _relative(studies: Sequence[LoadedStudy]) -> list[RelativeRow]:
    tables = [{row.variant: row.against_controls for row in study.report.rows} for study in studies]
    names = sorted({name for table in tables for name, one in table.items() if one}, key=variant_order)
    return [RelativeRow(name, is_control_arm(name), [table.get(name) for table in tables]) for name in names]


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
            "floor": study.report.floor and dataclasses.asdict(study.report.floor),
            "verdicts": [dataclasses.asdict(verdict) for verdict in study.report.verdicts],
        }
        for study in comparison.studies
    ]
    value: dict[str, Any] = {"schema": 1, "studies": studies, "reasons": comparison.reasons}
    for part in ("checks", "absolute", "relative", "alignments", "rankings", "across"):
        value[part] = [dataclasses.asdict(row) for row in getattr(comparison, part)]
    for row, line in zip(value["alignments"], comparison.alignments, strict=True):
        row |= {"within_tolerance": line.within_tolerance, "within_envelope": line.within_envelope}
    if comparison.sizes:
        value["sizes"] = sizes_json(comparison.sizes)
    return value
