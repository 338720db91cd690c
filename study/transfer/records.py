"""The record of one evaluation of a trained run on a platform. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from gpt2.artifacts.run_record import Amount, Count, Text
from gpt2.artifacts.seal import read_sealed, write_sealed
from gpt2.artifacts.typed_json import InvalidJsonError, JsonObject, Range, parse
from gpt2.system.read_files import DamagedFileError
from study.stats.statistics import Interval, paired_t

FOLDER = "platforms"
HOMES = {"float32": "fp32", "bfloat16": "bf16"}  # format of training -> its platform
Loss = Annotated[float, Range(0.0, 1e9)]


@dataclass(frozen=True)
class PlatformRecord(JsonObject):
    """The validation loss of a run on a platform. weights: SHA-256 of the evaluated weights, by name and bytes.

    identity: digest of weights, windows, platform, number format of training, device and version of torch. loss: nats
    per token. window_losses: mean nats per token of each window.
    """

    run: Text
    platform: Text
    identity: Text
    weights: Text
    windows: Text
    device: Text
    torch: Text
    loss: Loss
    tokens: Count
    window_losses: tuple[Loss, ...]
    seconds: Amount


def path_of(run_dir: Path, platform: str) -> Path:
    """Return the file of a record."""
    return run_dir / FOLDER / f"{platform.replace(':', '-')}.json"


def read(run_dir: Path, platform: str) -> PlatformRecord | None:
    """Return the record; None where there is none. A damaged one is evaluated again."""
    try:
        content = read_sealed(path_of(run_dir, platform))
        return parse(PlatformRecord, {k: v for k, v in content.items() if k != "seal"}, "record")
    except (FileNotFoundError, DamagedFileError, InvalidJsonError):
        return None


def write(run_dir: Path, record: PlatformRecord) -> None:
    """Write the record with its seal."""
    path = path_of(run_dir, record.platform)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(path, record.to_json())


def gap(home: PlatformRecord, other: PlatformRecord) -> Interval:
    """Return the loss on a platform minus that on the home platform, in nats, paired by window.

    The interval is over windows of this text: it says nothing about another run.
    """
    pairs = zip(other.window_losses, home.window_losses, strict=True)
    return paired_t([away - here for away, here in pairs]).difference
