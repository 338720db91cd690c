"""Write files atomically: a file is replaced completely or stays unchanged. Standard library only."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO


def finite(value: Any) -> Any:
    """Return plain data with NaN and infinities replaced by None, because JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def open_append(path: Path) -> TextIO:
    """Open a text file to append to it. What is not a regular file, such as a FIFO, is moved away first."""
    if path.exists() and not path.is_file():
        quarantine(path)
    return path.open("a", encoding="utf-8")


def quarantine(path: Path) -> Path:
    """Move a damaged file into the folder damaged/ beside it, under a free name. Returns the new path."""
    folder = path.parent / "damaged"
    folder.mkdir(exist_ok=True)
    return path.rename(unused(folder / path.name))


def unused(path: Path) -> Path:
    """Return the first of path, path.2, path.3, ... that does not exist."""
    names = (path.name if number == 1 else f"{path.name}.{number}" for number in itertools.count(1))
    return next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Delete the files of these names and the folder, which stays where it holds another file. A link is unlinked."""
    if folder.is_symlink():
        folder.unlink()
        return
    for name in names:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        folder.rmdir()


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file atomically: write a temporary file, flush it to the disk, rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = os.fspath(path)  # not the temporary file; an error of write() has no name
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the file atomically by `text` in UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace the file atomically by `value` as JSON."""
    write_text(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")
