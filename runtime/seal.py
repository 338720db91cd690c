"""Seal JSON files: the last value of a file is the SHA-256 of its other bytes. Standard library only.

    "seal": {"files": {"metrics.jsonl": "<SHA-256>", ...}, "this_file": "<SHA-256 of the file without these 64 digits>"}

`files` are files beside it. A sealed file contains no path and no time, so a copy on another machine keeps its seal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import files
from runtime.files import DamagedFileError, parse_json, read_bytes
from runtime.typed_json import JsonObject

MARK = b'"this_file": "'
DIGITS = 64


@dataclass(frozen=True)
class Seal(JsonObject):
    """SHA-256 of the files beside a sealed file, and of the file itself."""

    files: Mapping[str, str]
    this_file: str


def write_sealed(
    path: Path, value: Mapping[str, Any], beside: Iterable[str] = (), indent: int | None = 1
) -> None:
    """Replace the file atomically by `value` as JSON with a seal. beside: names of files, sealed if they exist."""
    found = {name: digest(path.with_name(name)) for name in beside if path.with_name(name).exists()}
    plain = files.finite({**value, "seal": {"files": found, "this_file": ""}})
    head, mark, tail = (json.dumps(plain, indent=indent, allow_nan=False) + "\n").encode().rpartition(MARK)
    files.write_bytes(path, head + mark + _digest(head + mark + tail).encode() + tail)


def read_sealed(path: Path) -> Any:
    """Return the JSON value in a file. DamagedFileError if it is not valid or does not agree with its seal.

    A file without a seal is only parsed.
    """
    content = read_bytes(path)
    value = parse_json(content, path)
    head, mark, rest = content.rpartition(MARK)
    if mark or (isinstance(value, dict) and "seal" in value):
        actual, recorded = _digest(head + mark + rest[DIGITS:]), rest[:DIGITS].decode(errors="replace")
        if actual != recorded:
            raise DamagedFileError(
                f"{path} was altered: SHA-256 is {actual[:12]}; its seal has {recorded[:12]}"
            )
    return value


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
