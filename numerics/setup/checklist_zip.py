"""The zip of one machine: tables of names and texts. It is read as data that anybody may have written.

`manifest.json` names the format, its version and the SHA-256 of every other member. Equal content gives equal bytes:
members are sorted and have one date. Nothing is extracted to the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from numerics.dump_files import replacing, writing
from numerics.errors import NumericsError

FORMAT, VERSION = "numerics check-config", 1
MANIFEST, SCRIPTS = "manifest.json", "scripts/"
FIRST_FORWARD = "first forward"  # beginning of the names of the model's inputs
MOST_BYTES = 256 << 20  # of all members, uncompressed
MOST_MEMBERS = 10_000

Table = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Snapshot:
    """The tables of one machine. A table that was not collected is None."""

    machine: dict[str, str]
    environment: dict[str, str]
    packages: dict[str, str]
    hyperparameters: dict[str, str] | None = None
    random: dict[str, str] | None = None
    data: dict[str, str] | None = None
    modules: Table | None = None
    parameters: Table | None = None
    scripts: Table | None = None
    texts: dict[str, str] = field(default_factory=dict)  # script -> text


NESTED = ("modules", "parameters", "scripts")
TABLES = tuple(entry.name for entry in fields(Snapshot) if entry.name != "texts")


def write_snapshot(snapshot: Snapshot, path: str | os.PathLike[str]) -> None:
    """Write the zip, complete or not at all."""
    tables = {name: getattr(snapshot, name) for name in TABLES}
    members = {f"{name}.json": _json(table) for name, table in tables.items() if table is not None}
    members |= {f"{SCRIPTS}{name}": text.encode() for name, text in snapshot.texts.items()}
    members[MANIFEST] = _json({"format": FORMAT, "version": VERSION, "members": _digests(members)})
    path = Path(path)
    with (
        writing(path, "name another file"),
        replacing(path) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in sorted(members):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3  # the same on every system
            archive.writestr(entry, members[name])


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode()


def _digests(members: dict[str, bytes]) -> dict[str, str]:
    return {
        name: hashlib.sha256(content).hexdigest() for name, content in members.items() if name != MANIFEST
    }


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Read a zip of write_snapshot. NumericsError where it is none, is damaged, or is of another version."""
    if Path(path).exists() and not Path(path).is_file():
        raise NumericsError(f"{path} is not a file; fix: give the zip of ConfigChecker")
    try:
        with zipfile.ZipFile(path) as archive:
            members = _members(archive)
        manifest = json.loads(members[MANIFEST])
        if manifest["format"] != FORMAT or manifest["members"] != _digests(members):
            raise ValueError(f"its content is not what {MANIFEST} lists")
        if manifest["version"] != VERSION:
            raise ValueError(f"it has version {str(manifest['version'])[:20]}, not {VERSION}")
        tables = {name: json.loads(members[f"{name}.json"]) for name in TABLES if f"{name}.json" in members}
        for name, table in tables.items():
            _check_texts(name, table.values() if name in NESTED else [table])
        texts = {
            name.removeprefix(SCRIPTS): text for name, text in members.items() if name.startswith(SCRIPTS)
        }
        return Snapshot(
            **tables, texts={name: text.decode("utf-8", "replace") for name, text in texts.items()}
        )
    except OSError as error:
        raise NumericsError(
            f"{path} cannot be read: {error.strerror or error}; fix: check its path"
        ) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, LookupError, TypeError,
            AttributeError, MemoryError) as error:  # fmt: skip
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise NumericsError(
            f"{path} is not a usable zip of check-config: {reason}; fix: pack it again: "
            "python -m numerics check-config pack"
        ) from error


def _members(archive: zipfile.ZipFile) -> dict[str, bytes]:
    """Read every member in memory, within limits that hold whatever the zip declares."""
    if len(archive.infolist()) > MOST_MEMBERS:
        raise ValueError(f"it has {len(archive.infolist())} members, more than {MOST_MEMBERS}")
    found: dict[str, bytes] = {}
    for entry in archive.infolist():
        with archive.open(entry) as file:
            found[entry.filename] = file.read(MOST_BYTES + 1)  # a false declared size changes nothing
        if sum(map(len, found.values())) > MOST_BYTES:
            raise ValueError(f"it holds more than {MOST_BYTES >> 20} MB")
    return found


def _check_texts(name: str, tables: Any) -> None:
    for table in tables:
        if not isinstance(table, dict) or not all(isinstance(text, str) for text in table.values()):
            raise ValueError(f"{name}.json holds no table of texts")
