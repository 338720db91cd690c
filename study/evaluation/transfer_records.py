"""The record of one evaluation of a trained run on a platform. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from referee.verdict.statistics import Interval, mean, paired_t, standard_deviation
from runtime import records, run_record
from runtime.files import DamagedFileError
from runtime.records import Amount, Count, Record, Share, Text
from runtime.run_record import RunRecord

FOLDER = "platforms"
HOMES = {"float32": "fp32", "bfloat16": "bf16"}  # format of training -> its platform
Loss = Annotated[float, Meta(ge=0.0, le=1e9)]


class ItemResults(Record, frozen=True):
    """HellaSwag on a platform, by the log-likelihood of a character."""

    acc_norm: Share
    items_sha256: Text
    choices: Text  # the chosen ending of each item, 0 to 3
    correct: Text  # whether it is right, 0 or 1


class PlatformRecord(Record, frozen=True):
    """The validation loss of a run on a platform. weights: SHA-256 of the evaluated weights, by name and bytes.

    platform: with @machine where that is not the machine of training. torchao: of quantised weights. loss: nats per
    token. window_losses: mean nats per token of each window. hellaswag: where the run has items.
    """

    run: Text
    platform: Text
    weights: Text
    windows: Text
    device: Text
    torch: Text
    loss: Loss
    tokens: Count
    window_losses: tuple[Loss, ...]
    seconds: Amount
    torchao: Text | None = None
    hellaswag: ItemResults | None = None


@dataclass(frozen=True)
class ItemGap:
    """Accuracy on a platform minus accuracy at home, paired by item. changed: items with another chosen ending."""

    difference: float
    stderr: float | None
    changed: int
    items: int


def home_platform(record: RunRecord) -> str:
    """Return the platform of training: its number format, on its machine."""
    return HOMES.get(record.target.dtype if record.target else "", "fp32")


def path_of(run_dir: Path, platform: str) -> Path:
    """Return the file of a record."""
    return run_dir / FOLDER / f"{platform.replace(':', '-')}.json"


def read(run_dir: Path, platform: str) -> PlatformRecord | None:
    """Return the record; None where there is none. A damaged one is evaluated again."""
    found = _read(path_of(run_dir, platform))
    return found if found and found.platform == platform else None


def _read(path: Path) -> PlatformRecord | None:
    try:
        return records.read(PlatformRecord, path, run_record.owner_at(path.parents[1]))
    except (FileNotFoundError, DamagedFileError, run_record.RecordError):
        return None


def read_at_home(run_dir: Path, record: RunRecord, platform: str) -> PlatformRecord | None:
    """Return the record of a platform of the machine of training; None for one of another device."""
    found = read(run_dir, platform)
    return found if found and record.target and found.device == record.target.device else None


def elsewhere(run_dir: Path) -> list[str]:
    """Return the platforms of other machines that have a record."""
    found = [_read(path) for path in sorted((run_dir / FOLDER).glob("*@*.json"))]
    return [record.platform for record in found if record]


def write(run_dir: Path, record: PlatformRecord) -> None:
    """Write the record."""
    path = path_of(run_dir, record.platform)
    path.parent.mkdir(parents=True, exist_ok=True)
    records.write(path, record, run_record.owner_at(run_dir))


def gap(home: PlatformRecord, other: PlatformRecord) -> Interval:
    """Return the loss on a platform minus that on the home platform, in nats, paired by window.

    The interval is over windows of this text: it says nothing about another run.
    """
    pairs = zip(other.window_losses, home.window_losses, strict=True)
    return paired_t([away - here for away, here in pairs]).difference


def item_gap(home: PlatformRecord, other: PlatformRecord) -> ItemGap | None:
    """Compare HellaSwag on a platform with that on the home platform; None without a score of the same items.

    The standard error is over the items of this run.
    """
    here, there = home.hellaswag, other.hellaswag
    if here is None or there is None or here.items_sha256 != there.items_sha256:
        return None
    right = zip(there.correct, here.correct, strict=True)
    chosen = zip(there.choices, here.choices, strict=True)
    differences = [float(int(one) - int(before)) for one, before in right]
    count = len(differences)
    stderr = standard_deviation(differences) / math.sqrt(count) if count > 1 else None
    return ItemGap(mean(differences), stderr, sum(one != before for one, before in chosen), count)
