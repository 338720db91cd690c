"""Compare two or more studies from their records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ra.arms import control_groups, parse_arm
from referee.numerics.setup.checklist_rows import EQUAL, ChecklistRow
from referee.verdict.statistics import Interval, mean, mean_interval
from study.compare.alignment import Alignment, align
from study.compare.compare_sizes import SizeComparison, compare_sizes
from study.compare.loaded_studies import LoadedStudy, read_studies
from study.compare.ranking import Across, Order, across
from study.compare.study_checklist import checklist
from study.runs import final_losses, variant_order

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
    orders: list[Order] = field(default_factory=list)
    across: list[Across] = field(default_factory=list)
    sizes: SizeComparison | None = None  # where the studies differ in model size

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
    orders, shared = across(studies)
    return StudyComparison(
        studies=studies,
        reasons=reasons,
        checks=checks,
        absolute=absolute,
        relative=_relative(studies),
        alignments=[line for other in studies[1:] for line in align(studies[0], other)],
        orders=orders,
        across=shared,
        sizes=compare_sizes(studies),
    )


def _absolute(studies: Sequence[LoadedStudy], excluded: set[str]) -> list[AbsoluteRow]:
    """Return a row for each shared variant that is not excluded, and one for the mean of the control arms.

    The checklist has shown that the runs of a variant made the same updates in every study.
    """
    tables = [final_losses(study.used) for study in studies]
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
    for part in ("checks", "absolute", "relative", "alignments", "orders", "across"):
        value[part] = [dataclasses.asdict(row) for row in getattr(comparison, part)]
    if comparison.sizes:
        value["sizes"] = dataclasses.asdict(comparison.sizes)
    return value
