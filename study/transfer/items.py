"""The items of HellaSwag for an evaluation of a finished run, on any machine."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from gpt2 import hellaswag
from runtime.errors import UserError
from runtime.files import DamagedFileError
from runtime.run_record import RunRecord
from runtime.settings import Config
from runtime.typed_json import read_file
from study.records.hellaswag_scores import ItemsFile
from study.transfer.records import ItemResults


@dataclass(frozen=True)
class ItemSource:
    """path: of the items, None without. sha256: of the scored items, "" without. absent: why there are none."""

    path: Path | None = None
    sha256: str = ""
    absent: str = ""


def find_items(run_dir: Path, record: RunRecord, config: Config) -> ItemSource:
    """Find the items that the run was scored on: its study's file, the configured one, or a download.

    A run without HellaSwag has none. Items of another digest than the run's are not scored.
    """
    settings = config.evaluation
    scored = record.hellaswag.items_sha256 if record.hellaswag else None
    if not settings.hellaswag:
        return ItemSource()
    path = _of_study(run_dir)
    if path is None:
        if settings.hellaswag_file and not settings.hellaswag_file.is_file():  # a path of another machine
            settings = replace(settings, hellaswag_file=None)
        found = hellaswag.obtain(settings, config.data.directory, report=print)
        if isinstance(found, str):
            return ItemSource(absent=found)
        path = found
    try:
        sha256 = hellaswag.digest(hellaswag.load_items(path, settings.hellaswag_limit))
    except UserError as error:
        return ItemSource(absent=str(error))
    if scored and sha256 != scored:
        fix = f"fix: copy the items of the run to {config.data.directory / hellaswag.FILE_NAME}"
        return ItemSource(absent=f"{path} has other items than the run was scored on; {fix}")
    return ItemSource(path, sha256)


def _of_study(run_dir: Path) -> Path | None:
    """Return the file of items that the run's study names, if this machine has it."""
    with contextlib.suppress(FileNotFoundError, DamagedFileError):
        named = read_file(ItemsFile, run_dir.resolve().parents[1] / "hellaswag.json").path
        if named and Path(named).is_file():
            return Path(named)
    return None


def compact(score: hellaswag.HellaSwag) -> ItemResults:
    """Return the results with one character an item."""
    chosen = ["".join(map(str, one)) for one in (score.choices, score.choices_norm)]
    right = ["".join(str(int(one)) for one in column) for column in (score.correct, score.correct_norm)]
    return ItemResults(score.acc, score.acc_norm, score.items_sha256, *chosen, *right)
