"""Read and write manifest.json, which lists the shards of a prepared corpus."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.data.sources import DataError

SCHEMA = 1
REBUILD = "fix: make data (it checks the corpus and rebuilds it)"


@dataclass(frozen=True)
class Shard:
    """A file of uint16 tokens. file: its name in the corpus's folder."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """The shards of the training or the validation text. tokens: their sum."""

    tokens: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of a prepared corpus. source: the identity of its text; end_of_text: token id."""

    source: dict[str, Any]
    tokenizer: str
    documents: int
    end_of_text: int
    splits: dict[str, Split]  # "train" and "validation"
    split_rule: str
    schema: int = SCHEMA

    def write(self, directory: Path) -> None:
        """Write manifest.json and flush it to the disk."""
        with (directory / "manifest.json").open("w") as file:
            json.dump(dataclasses.asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def read_manifest(directory: Path) -> Manifest:
    """Read manifest.json. DataError where it is missing or damaged."""
    path = directory / "manifest.json"
    try:
        fields = json.loads(path.read_text())
        fields["splits"] = {
            name: Split(int(fields["splits"][name]["tokens"]), _shards(fields["splits"][name]["shards"]))
            for name in ("train", "validation")
        }
        return Manifest(**fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}); {REBUILD}") from error


def _shards(rows: list[dict[str, Any]]) -> tuple[Shard, ...]:
    return tuple(Shard(str(row["file"]), int(row["tokens"]), str(row["sha256"])) for row in rows)
