"""Read the studies of a comparison: the runs that count, their settings and their training curves.

Records only; needs no torch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.dotconfig import ConfigError, parse_lines, read_text
from runtime.errors import UserError
from runtime.symbol_effects import WORDS
from study.report import report_data as build
from study.report.report_data import Report
from study.runs import Run

CHOICES = tuple(word for word in WORDS if word.endswith("_"))  # the member that is y is the value


@dataclass
class LoadedStudy:
    """One side of the comparison; label is its name, unique among the studies compared.

    configs: run -> its saved settings by symbol, None where they cannot be read.
    """

    label: str
    path: Path
    report: Report
    configs: dict[str, dict[str, str] | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def used(self) -> list[Run]:
        return self.report.used

    @property
    def variants(self) -> list[str]:
        return self.report.variants

    @property
    def seeds(self) -> set[int]:
        return {seed for _, seed in self.runs()}

    def runs(self) -> dict[tuple[str, int], Run]:
        """(variant, seed) -> the run that counts."""
        return {(run.variant, run.seed): run for run in self.report.used if run.seed is not None}


def read_studies(paths: Sequence[Path]) -> list[LoadedStudy]:
    """Read the named studies. UserError for one study alone, one named twice, or a folder without a study."""
    if len(paths) < 2:
        given = f"{paths[0]} alone" if paths else "none"
        raise UserError(f'{given} was named to compare; fix: make compare STUDIES="results/a results/b"')
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; fix: name results/NAME of a study")
        if not (path / "runs").is_dir():
            raise UserError(
                f"{path} is not a study: it has no folder runs; fix: name results/NAME of a study"
            )
    twice = [str(path) for path, count in Counter(path.resolve() for path in paths).items() if count > 1]
    if twice:
        raise UserError(f"{twice[0]} is named twice; fix: name two different studies")
    return [_read(path, label) for path, label in zip(paths, labels(paths), strict=True)]


def labels(paths: Sequence[Path]) -> list[str]:
    """A name for each folder: its last part, or its path below the folder that contains all of them."""
    names = [path.resolve().name for path in paths]
    above = os.path.commonpath([path.resolve().parent for path in paths])
    return (
        names if len({*names}) == len(names) else [os.path.relpath(path.resolve(), above) for path in paths]
    )


def _read(path: Path, label: str) -> LoadedStudy:
    study = LoadedStudy(label, path, build.build_report(path))
    for run in study.report.used:
        try:
            study.configs[run.name] = read_settings(path / "runs" / run.name)
        except ConfigError as error:
            study.configs[run.name] = None
            study.notes.append(f"{run.name}: its settings cannot be read: {error}")
    return study


def read_settings(run_dir: Path) -> dict[str, str] | None:
    """The run's saved settings, or the study's; choices as one symbol, without the ending underscore."""
    for path in (run_dir / "config", run_dir.parents[1] / "config"):
        if path.exists():
            entries = parse_lines(read_text(path), str(path))
            return folded({name: entry.value for name, entry in entries.items()})
    return None


def folded(values: dict[str, str]) -> dict[str, str]:
    """The same settings with each choice of CHOICES as one symbol, whose value is the member that is y."""
    result = {}
    for name, value in values.items():
        prefix = next((prefix for prefix in CHOICES if name.startswith(prefix)), None)
        if prefix is None or value not in ("y", "n") or name == "TARGET_DETECTED_CPU":
            result[name] = value
        elif value == "y":
            result[prefix.rstrip("_")] = name.removeprefix(prefix).lower()
    return result
