"""The effect of each judged arm over compared studies of different model sizes, and its trend. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ra.names import is_control_arm
from study.analysis.trend import SizeTrend, trends
from study.compare.load import LoadedStudy
from study.records.runs import BASELINE

SHARED = ("data", "validation", "batch", "numbers")  # of the fingerprint, at all sizes


@dataclass(frozen=True)
class SizedStudy:
    """The study of one size."""

    study: str
    parameters: int  # of the baseline, or of another control arm; 0 without one
    tokens: int  # of a run
    counted: int  # finished runs that count
    runs: int  # planned runs

    @property
    def flops(self) -> float:
        """Training FLOPs of a run: 6 x parameters x tokens (Kaplan et al. 2020, arXiv:2001.08361)."""
        return 6.0 * self.parameters * self.tokens


@dataclass(frozen=True)
class SizeComparison:
    """Rows and trends, the smallest model first."""

    rows: list[SizedStudy]
    trends: list[SizeTrend]
    problems: list[str]  # why there is no trend, or what a reader must know


def compare_sizes(studies: Sequence[LoadedStudy]) -> SizeComparison | None:
    """Judge the trend over studies with finished runs; None where sizes are equal or unknown.

    The tokenizer changes the number of parameters, so sizes of several tokenizers are unknown.
    """
    pairs = sorted(((_row(study), study) for study in studies), key=lambda pair: pair[0].parameters)
    rows = [row for row, _ in pairs]
    tokenizers = {study.used[0].record.fingerprint.tokenizer for study in studies}
    if len({row.parameters for row in rows}) < 2 or not rows[0].parameters or len(tokenizers) > 1:
        return None
    different = _different(studies)
    by_size = [[] if different else study.report.verdicts for _, study in pairs]
    return SizeComparison(
        rows=rows,
        trends=trends([row.parameters for row in rows], by_size),
        problems=[*_unfinished(rows), *different],
    )


def _row(study: LoadedStudy) -> SizedStudy:
    controls = [run for run in study.used if is_control_arm(run.variant)]
    first = min(controls, key=lambda run: run.variant != BASELINE, default=None)
    return SizedStudy(
        study=study.label,
        parameters=first.record.parameters or 0 if first else 0,
        tokens=first.record.progress.tokens if first else 0,
        counted=len(study.used),
        runs=len(study.report.runs),
    )


def _unfinished(rows: Sequence[SizedStudy]) -> list[str]:
    return [
        f"{row.study}: {row.counted} of {row.runs} runs are finished; fix: `make` continues"
        for row in rows
        if row.counted < row.runs
    ]


def _different(studies: Sequence[LoadedStudy]) -> list[str]:
    """Name the entries of the fingerprint that differ among the sizes."""
    prints = [study.used[0].record.fingerprint for study in studies]
    differing = [name for name in SHARED if len({getattr(one, name) for one in prints}) > 1]
    if not differing:
        return []
    return [
        f"The studies differ in {', '.join(differing)}, so their effects are not compared; fix: run them with one "
        "defconfig command that changes CONFIG_STUDY_NAME and the model only"
    ]


def as_json(report: SizeComparison) -> dict[str, Any]:
    """Return the report as plain data."""
    value = dataclasses.asdict(report)
    for row, source in zip(value["rows"], report.rows, strict=True):
        row["flops"] = source.flops
    return value
