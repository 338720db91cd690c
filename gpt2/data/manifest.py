"""Read and write manifest.json, which lists the shards of a prepared corpus."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpt2.data.sources import DataError
from runtime.files import DamagedFileError
from runtime.typed_json import Count, Text, read_file

FILE = re.compile(r"(train|validation)-\d+\.bin|manifest\.json")
REBUILD = "fix: make data (it checks the corpus and rebuilds it)"


@dataclass(frozen=True)
class Shard:
    """A file of uint16 tokens. file: its name in the corpus's folder."""

    file: Text
    tokens: Count
    sha256: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-]+\.bin", self.file, re.ASCII):  # no path: `make clean` removes the file
            raise ValueError(f"a shard has the name {self.file!r}")


@dataclass(frozen=True)
class Split:
    """The shards of the training or the validation text. tokens: their sum."""

    tokens: Count
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if self.tokens != sum(shard.tokens for shard in self.shards):
            raise ValueError(f"a split has {self.tokens} tokens, its shards have another number")


@dataclass(frozen=True)
class Manifest:
    """The content of a prepared corpus. source: the identity of its text; end_of_text: token id.

    marks: how often the text has letters such as <|endoftext|>, which are ordinary tokens.
    """

    source: Mapping[str, Any]
    tokenizer: str
    documents: Count
    end_of_text: Count
    splits: Mapping[str, Split]  # "train" and "validation"
    split_rule: str
    marks: Mapping[str, Count] = field(default_factory=dict)
    schema: Literal[1] = 1

    def __post_init__(self) -> None:
        if set(self.splits) != {"train", "validation"}:
            raise ValueError(f"its splits are {sorted(self.splits)}")
        if type(self.source.get("validation_permille")) is not int or "dataset" not in self.source:
            raise ValueError("its source has no dataset or no validation_permille")

    def write(self, directory: Path) -> None:
        """Write manifest.json and flush it to the disk."""
        with (directory / "manifest.json").open("w") as file:
            json.dump(dataclasses.asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def written_files(directory: Path) -> list[str]:
    """Return the names of the shards and the manifest in the folder of a corpus, which may be unfinished."""
    return sorted(path.name for path in directory.glob("*") if FILE.fullmatch(path.name))


def read_manifest(directory: Path) -> Manifest:
    """Read manifest.json. DataError where it is missing or damaged."""
    path = directory / "manifest.json"
    try:
        return read_file(Manifest, path)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; {REBUILD}") from error
    except DamagedFileError as error:
        raise DataError(f"{error}; {REBUILD}") from error
