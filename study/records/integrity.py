"""Check the side files of a finished run against the seal of its record. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime import seal
from runtime.run_record import (
    Batch,
    Environment,
    Fingerprint,
    Progress,
    RecordedTarget,
    RecordedValidation,
    RunRecord,
    Schedule,
)

REMEDY = "fix: restore the files from a copy, or delete the run's folder and run `make`"


@dataclass(frozen=True)
class FinishedValidation(RecordedValidation):
    """A validation with a finite loss."""

    loss: float


@dataclass(frozen=True)
class FinishedRecord(RunRecord):
    """A record whose results count: these parts are known. A type for readers; `load` returns RunRecord."""

    fingerprint: Fingerprint
    target: RecordedTarget
    batch: Batch
    progress: Progress
    validation: FinishedValidation
    environment: Environment
    schedule: Schedule


def disagreements(run: RunRecord, folder: Path) -> list[str]:
    """Return a message for every side file of a finished run whose SHA-256 is not that of the record's seal."""
    if run.status != "finished" or run.seal is None:
        return []
    found = []
    for name, recorded in run.seal.files.items():
        path = folder / name
        actual = seal.digest(path) if path.is_file() else "missing"
        if actual != recorded:
            found.append(f"{path.name}: SHA-256 is {actual[:12]}; the record has {recorded[:12]}")
    return found
