"""The effect of each judged arm at each size, and its trend, from the records of the studies. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.system.errors import UserError
from gpt2.system.read_files import DamagedFileError, read_json
from ra.names import is_control_arm
from study.analysis.trend import SizeTrend, trends
from study.analysis.verdict import Verdict
from study.records.runs import BASELINE
from study.report.build import Report, build_report
from study.runner.settings import symbol_of

FILE = "sizes.json"
SHARED = ("data", "tokenizer", "validation", "batch")  # of the fingerprint, at all sizes


@dataclass(frozen=True)
class SizeRow:
    """The study of one size. parameters: of the baseline; tokens: of a run; both None without a finished run.

    counted, runs: finished runs that count, and planned runs.
    """

    size: str
    study: str
    parameters: int | None
    tokens: int | None
    counted: int
    runs: int

    @property
    def flops(self) -> float | None:
        """Training FLOPs of a run: 6 x parameters x tokens (Kaplan et al. 2020, arXiv:2001.08361)."""
        return 6.0 * self.parameters * self.tokens if self.parameters and self.tokens else None


@dataclass(frozen=True)
class SizesReport:
    """problems: why there is no trend, or what a reader must know."""

    name: str
    rows: list[SizeRow]
    trends: list[SizeTrend]
    problems: list[str]


def study_folder(directory: Path, size: str) -> Path:
    """Return the folder of the study of a size. directory: of the study of all sizes."""
    return directory.with_name(f"{directory.name}-{size}")


def read_sizes(directory: Path) -> tuple[str, ...]:
    """Return the sizes in sizes.json. UserError where it is damaged; empty where there is none."""
    path = directory / FILE
    try:
        content = read_json(path)
        sizes = tuple(row["size"] for row in content["rows"])
        [symbol_of(size) for size in sizes]
    except FileNotFoundError:
        return ()
    except (DamagedFileError, TypeError, KeyError, StopIteration) as error:
        raise UserError(f"{path} is damaged ({error!r}); fix: run `make`, which writes it") from error
    return sizes


def build_sizes(directory: Path, sizes: Sequence[str]) -> SizesReport:
    """Judge the trend over the studies in `directory`-SIZE."""
    folders = [study_folder(directory, size) for size in sizes]
    reports = [build_report(folder) if (folder / "runs").is_dir() else None for folder in folders]
    rows = [
        _row(size, folder.name, report) for size, folder, report in zip(sizes, folders, reports, strict=True)
    ]
    problems = [*_unfinished(rows), *_different(sizes, reports)]
    by_size: list[list[Verdict]] = [report.verdicts if report else [] for report in reports]
    if _different(sizes, reports):
        by_size = [[] for _ in reports]
    return SizesReport(
        name=directory.resolve().name,
        rows=rows,
        trends=trends([row.parameters or 0 for row in rows], by_size),
        problems=problems,
    )


def _row(size: str, study: str, report: Report | None) -> SizeRow:
    used = report.used if report else []
    first = min(
        used, key=lambda run: (run.variant != BASELINE, not is_control_arm(run.variant)), default=None
    )
    return SizeRow(
        size=size,
        study=study,
        parameters=first.record.parameters if first else None,
        tokens=first.record.progress.tokens if first else None,
        counted=len(used),
        runs=len(report.runs) if report else 0,
    )


def _unfinished(rows: Sequence[SizeRow]) -> list[str]:
    return [
        f"{row.study}: {row.counted} of {row.runs} runs are finished; `make` continues."
        if row.runs
        else f"{row.study} has no judged run yet; `make` runs it."
        for row in rows
        if not row.runs or row.counted < row.runs
    ]


def _different(sizes: Sequence[str], reports: Sequence[Report | None]) -> list[str]:
    """Name the entries of the fingerprint that differ among the sizes."""
    used = {
        size: report.used[0].record.fingerprint
        for size, report in zip(sizes, reports, strict=True)
        if report and report.used
    }
    differing = [name for name in SHARED if len({getattr(one, name) for one in used.values()}) > 1]
    if not differing:
        return []
    return [
        f"The studies of {', '.join(used)} differ in {', '.join(differing)}, so their effects are not compared; fix: "
        "run the sizes from one .config under another CONFIG_STUDY_NAME."
    ]


def as_json(report: SizesReport) -> dict[str, Any]:
    """Return the report as plain data."""
    value = dataclasses.asdict(report)
    for row, source in zip(value["rows"], report.rows, strict=True):
        row["flops"] = source.flops
    return {"schema": 1} | value
