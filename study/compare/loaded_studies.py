"""Read the studies of a comparison: the runs that count, their settings and their training curves.

Records only; needs no torch.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from referee.numerics.diagnose.symptoms import EPSILON
from referee.numerics.rows import TableRow
from referee.numerics.setup.script_settings import leaves
from referee.verdict.loss_files import LossCurve, read_curve, same_file
from runtime import run_record
from runtime.dotconfig import ConfigError, parse_lines, read_text
from runtime.errors import UserError
from runtime.records import Task
from runtime.run_record import RunRecord
from study.report import report_data as build
from study.report.report_data import Report
from study.runs import Run, module, task_of
from study.study_settings import declared


@dataclass
class LoadedStudy:
    """One side of the comparison; label is its name, unique among the studies compared.

    configs: run -> its saved settings by symbol, None where they cannot be read.
    """

    label: str
    path: Path
    report: Report  # or that of study.grpo_page, which has the entries that both need
    task: Task = "gpt2"
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
    studies = [_read(path, label) for path, label in zip(paths, labels(paths), strict=True)]
    if len({study.task for study in studies}) > 1:
        raise UserError("one study trains by GRPO and another GPT-2; fix: name studies of one task")
    return studies


def labels(paths: Sequence[Path]) -> list[str]:
    """A name for each folder: its last part, or its path below the folder that contains all of them."""
    names = [path.resolve().name for path in paths]
    above = os.path.commonpath([path.resolve().parent for path in paths])
    return (
        names if len({*names}) == len(names) else [os.path.relpath(path.resolve(), above) for path in paths]
    )


def _read(path: Path, label: str) -> LoadedStudy:
    task = task_of(path)
    report = build.build_report(path) if task == "gpt2" else module("study.grpo_page").build_report(path)
    study = LoadedStudy(label, path, report, task)
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
    """The same settings with each choice as one symbol, whose value is the member that is y."""
    result = {}
    for name, value in values.items():
        symbol = declared(name)
        if not symbol.members:
            result[name] = value
        elif value == "y":
            result[symbol.name.rstrip("_")] = name.removeprefix(symbol.name).lower()
    return result


# Two runs of this repository, or files of losses, for `make diagnose`: their curves, and the settings that differ.


PARTS = ("fingerprint", "target", "batch", "environment")  # of run.json
# Where these differ, records of one step have other inputs or weights.
BLOCKING = ("run.", "fingerprint.", "schedule.")
ABSENT = "not recorded"
TRAINING = ("numbers", "rounding")  # effects of symbols that change a training step


@dataclass
class RunSide:
    """One run. record: None for a file of losses."""

    path: Path
    label: str
    curve: LossCurve
    record: RunRecord | None = None

    @property
    def epsilon(self) -> float:
        """Return the rounding of the run's precision."""
        dtype = self.record.target.dtype if self.record and self.record.target else "float32"
        return EPSILON.get(dtype, EPSILON["float32"])

    @property
    def has_settings(self) -> bool:
        """Whether the run recorded all that is compared."""
        return self.record is not None and None not in (getattr(self.record, part) for part in PARTS)

    @property
    def settings(self) -> dict[str, str]:
        """Return what the run recorded and may change its numbers, by dotted path."""
        if self.record is None:
            return {}
        record, config = self.record, read_settings(self.path) or {}
        parts = {part: value.to_json() for part in PARTS if (value := getattr(record, part))}
        found = {
            "run": {"variant": record.variant, "seed": record.seed},
            "schedule": {"iterations": record.schedule.iterations if record.schedule else None},
            **parts,
            "config": {name: config[name] for name in config if declared(name).effect in TRAINING},
        }
        return {name: str(value) for name, value in leaves(found)}


def check_paths(paths: Sequence[Path], least: int, usage: str) -> None:
    """Raise UserError unless the paths name `least` to two runs. usage: the fix."""
    if not least <= len(paths) <= 2:
        needed = "two" if least == 2 else "one or two"
        raise UserError(f"RUNS names {len(paths)} runs, {needed} are needed; {usage}")
    if len(paths) == 2 and same_file(*paths):
        raise UserError(f"{paths[0]} is named twice; {usage}")
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist; {usage}")
        if (path / "runs").is_dir():
            raise UserError(f"{path} is a study; fix: name one of its runs, such as {path / 'runs/B0'}")


def read_sides(paths: Sequence[Path]) -> list[RunSide]:
    """Read run folders or files of losses. UserError and NumericsError name what cannot be used."""
    return [_read_side(path, label) for path, label in zip(paths, labels(paths), strict=True)]


def _read_side(path: Path, label: str) -> RunSide:
    if not (path / "run.json").exists():
        return RunSide(path, label, read_curve(path, label))
    record = run_record.load_given(path)
    metrics = path / "metrics.jsonl"
    has_metrics = metrics.exists() and metrics.stat().st_size
    curve = read_curve(path, label) if has_metrics else LossCurve(label, {})
    # the step that is not finite ends the process before it is logged
    failed = {fault.iteration + 1: math.nan for fault in record.faults}
    curve.losses = dict(sorted((failed | curve.losses).items()))
    if not curve.losses:
        raise UserError(f"{path} has no losses: no metrics.jsonl; fix: name a run that has trained")
    return RunSide(path, label, curve, record)


def differing_settings(golden: RunSide, target: RunSide) -> list[TableRow]:
    """Return a row for each recorded setting that differs; none where a side is a file of losses."""
    if not (golden.record and target.record):
        return []
    first, second = golden.settings, target.settings
    return [
        TableRow(
            name,
            target=second.get(name, ABSENT),
            golden=first.get(name, ABSENT),
            units=math.nan,
            evidence="setting",
        )
        for name in {**first, **second}
        if first.get(name) != second.get(name)
    ]
