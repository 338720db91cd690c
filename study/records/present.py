"""The records of runs that can be read. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from runtime import run_record
from runtime.run_record import RunRecord


def read_record(run_dir: Path) -> RunRecord | None:
    """Return the record of a run; None where it is missing or damaged."""
    try:
        return run_record.load(run_dir)
    except run_record.RecordError:
        return None


def read_records(study_dir: Path) -> dict[Path, RunRecord]:
    """Return folder -> record of each run that has a readable one, in the order of the names."""
    found = {folder: read_record(folder) for folder in sorted((study_dir / "runs").glob("*/"))}
    return {folder: record for folder, record in found.items() if record}
