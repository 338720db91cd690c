"""Two runs of this repository, or files of losses, for `make diagnose`: their curves, and the settings that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from referee.numerics.diagnose.symptoms import EPSILON
from referee.numerics.rows import TableRow
from referee.numerics.setup.script_settings import leaves
from referee.verdict.loss_files import LossCurve, read_curve, same_file
from runtime import run_record
from runtime.errors import UserError
from runtime.run_record import RunRecord
from runtime.symbol_effects import declared
from study.compare.loaded_studies import labels, read_settings

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
