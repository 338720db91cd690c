"""The zip of one machine's checklist: one JSON document, which is read as data that anybody may have written.

Equal content gives equal bytes. Nothing is extracted to the disk.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from pathlib import Path

from numerics.dump_files import replacing, writing
from numerics.errors import NumericsError

MEMBER, VERSION = "checklist.json", 2
MOST_BYTES = 256 << 20  # of the document, uncompressed

Tables = dict[str, dict[str, str]]  # group -> entry -> value; a group that was not collected is absent


def write_checklist(tables: Tables, path: str | os.PathLike[str]) -> None:
    """Write the zip, complete or not at all."""
    path = Path(path)
    entry = zipfile.ZipInfo(MEMBER, (1980, 1, 1, 0, 0, 0))
    entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3  # the same on every system
    with (
        writing(path, "name another file"),
        replacing(path) as temporary,
        zipfile.ZipFile(temporary, "w") as archive,
    ):
        archive.writestr(entry, json.dumps({"version": VERSION, **tables}, indent=1, sort_keys=True))


def read_checklist(path: str | os.PathLike[str]) -> Tables:
    """Read a zip of write_checklist. NumericsError where it is none, is damaged, or is of another version."""
    if Path(path).exists() and not Path(path).is_file():
        raise NumericsError(f"{path} is not a file; fix: give the zip of ConfigChecker")
    try:
        with zipfile.ZipFile(path) as archive, archive.open(MEMBER) as file:
            content = file.read(MOST_BYTES + 1)  # a false declared size changes nothing
        if len(content) > MOST_BYTES:
            raise ValueError(f"it holds more than {MOST_BYTES >> 20} MB")
        tables = json.loads(content)
        if tables.pop("version") != VERSION:
            raise ValueError(f"its version is not {VERSION}")
        for name, table in tables.items():
            if not all(isinstance(text, str) for text in table.values()):
                raise ValueError(f"{name[:40]} is no table of texts")
        return dict(tables)
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
