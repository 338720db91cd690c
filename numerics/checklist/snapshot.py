"""The zip of one machine: tables of names and texts. It is read as data that anybody may have written.

`manifest.json` names the format, its version and the SHA-256 of every other member. Equal content gives equal bytes:
members are sorted and have one date. Nothing is ever extracted to disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from numerics.dump_files import replacing, writing
from numerics.errors import NumericsError

FORMAT, VERSION = "numerics check-config", 1
MANIFEST = "manifest.json"
SCRIPTS = "scripts/"
FIRST_FORWARD = "first forward"  # beginning of the names of the model's inputs
MOST_BYTES = 256 << 20  # of all members, uncompressed
MOST_MEMBERS = 10_000
DATE = (1980, 1, 1, 0, 0, 0)

Table = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Snapshot:
    """The tables of one machine. A table that was not collected is None. texts: script -> text."""

    machine: dict[str, str]
    environment: dict[str, str]
    packages: dict[str, str]
    hyperparameters: dict[str, str] | None = None
    random: dict[str, str] | None = None
    data: dict[str, str] | None = None
    modules: Table | None = None
    parameters: Table | None = None
    scripts: Table | None = None
    texts: dict[str, str] = field(default_factory=dict)


FLAT = ("machine", "environment", "packages", "hyperparameters", "random", "data")
NESTED = ("modules", "parameters", "scripts")
REQUIRED = ("machine", "environment", "packages")


def write_snapshot(snapshot: Snapshot, path: str | os.PathLike[str]) -> None:
    """Write the zip, complete or not at all."""
    tables = {
        entry.name: getattr(snapshot, entry.name) for entry in fields(snapshot) if entry.name != "texts"
    }
    members = {f"{name}.json": _json(table) for name, table in tables.items() if table is not None}
    members |= {f"{SCRIPTS}{name}": text.encode() for name, text in snapshot.texts.items()}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in members.items()}
    members[MANIFEST] = _json({"format": FORMAT, "version": VERSION, "members": digests})
    path = Path(path)
    with (
        writing(path, "name another file"),
        replacing(path) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive,
    ):
        for name in sorted(members):
            entry = zipfile.ZipInfo(name, DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system, entry.external_attr = 3, 0o644 << 16  # the same on every system
            archive.writestr(entry, members[name])


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode()


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Read a zip of write_snapshot. NumericsError where it is none, is damaged, or is of another version."""
    if Path(path).exists() and not Path(path).is_file():
        raise NumericsError(f"{path} is not a file; fix: give the zip of ConfigChecker")
    try:
        with zipfile.ZipFile(path) as archive:
            members = _members(archive, path)
    except OSError as error:
        raise NumericsError(
            f"{path} cannot be read: {error.strerror or error}; fix: check its path"
        ) from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        RuntimeError,
        ValueError,
        LookupError,
        MemoryError,
        struct.error,
    ) as error:
        raise _damaged(path, str(error) or type(error).__name__) from error
    manifest = _manifest(members, path)
    digests = {
        name: hashlib.sha256(content).hexdigest() for name, content in members.items() if name != MANIFEST
    }
    if wrong := sorted(digests.items() ^ manifest.items()):
        raise _damaged(path, f"{wrong[0][0]} is missing, unknown or changed")
    tables = {
        name: _table(members[f"{name}.json"], path, name)
        for name in (*FLAT, *NESTED)
        if f"{name}.json" in members
    }
    if missing := [name for name in REQUIRED if name not in tables]:
        raise _damaged(path, f"it has no {missing[0]}.json")
    texts = {
        name.removeprefix(SCRIPTS): content.decode("utf-8", "replace")
        for name, content in members.items()
        if name.startswith(SCRIPTS)
    }
    return Snapshot(**tables, texts=texts)


def _damaged(path: str | os.PathLike[str], why: str) -> NumericsError:
    return NumericsError(
        f"{path} is not a usable zip of check-config: {why}; fix: pack it again: python -m numerics check-config pack"
    )


def _members(archive: zipfile.ZipFile, path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Read every member in memory, within limits that hold whatever the zip declares."""
    entries = archive.infolist()
    if len(entries) > MOST_MEMBERS:
        raise _damaged(path, f"it has {len(entries)} members, more than {MOST_MEMBERS}")
    names = [entry.filename for entry in entries]
    if len(set(names)) < len(names):
        raise _damaged(path, "a member is there twice")
    found: dict[str, bytes] = {}
    left = MOST_BYTES
    for entry in entries:
        name = entry.filename
        if name.startswith("/") or "\\" in name or ":" in name or ".." in name.split("/"):
            raise _damaged(path, f"the member name {name!r} leads out of it")
        if entry.external_attr >> 16 & 0o170000 not in (0, 0o100000):
            raise _damaged(path, f"{name!r} is not a plain file")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _damaged(path, f"{name!r} has an unknown compression")
        with archive.open(entry) as file:
            content = file.read(left + 1)  # a false declared size changes nothing
        left -= len(content)
        if left < 0:
            raise _damaged(path, f"it holds more than {MOST_BYTES >> 20} MB")
        found[name] = content
    return found


def _manifest(members: Mapping[str, bytes], path: str | os.PathLike[str]) -> dict[str, str]:
    if MANIFEST not in members:
        raise _damaged(path, f"it has no {MANIFEST}")
    manifest = _parsed(members[MANIFEST], path, MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _damaged(path, f"{MANIFEST} does not name the format {FORMAT!r}")
    if manifest.get("version") != VERSION:
        raise NumericsError(
            f"{path} has version {str(manifest.get('version'))[:20]!r} of the format, this program reads {VERSION}; "
            "fix: pack and compare with one version of numerics"
        )
    digests = manifest.get("members")
    if not isinstance(digests, dict) or not all(isinstance(value, str) for value in digests.values()):
        raise _damaged(path, f"{MANIFEST} lists no members")
    return digests


def _parsed(content: bytes, path: str | os.PathLike[str], name: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{name} is not JSON") from error


def _table(content: bytes, path: str | os.PathLike[str], name: str) -> Any:
    """Return name -> text, or name -> name -> text."""

    def flat(value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())

    table = _parsed(content, path, f"{name}.json")
    fits = flat(table) if name in FLAT else isinstance(table, dict) and all(map(flat, table.values()))
    if not fits:
        raise _damaged(path, f"{name}.json holds no table of texts")
    return table
