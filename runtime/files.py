"""Write files atomically: a file is replaced completely or stays unchanged. Standard library only."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from runtime.errors import UserError

T = TypeVar("T")


def json_data(value: Any) -> Any:
    """Return plain data with what JSON in UTF-8 lacks replaced: NaN and infinities by None, lone surrogates by escapes.

    The text of an error has a surrogate for each byte of a file's name that is no UTF-8.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {json_data(str(key)): json_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_data(item) for item in value]
    return value


def open_append(path: Path) -> TextIO:
    """Open a text file to append to it. What is not a regular file, such as a FIFO, is moved away first."""
    if path.exists() and not path.is_file():
        quarantine(path)
    return path.open("a", encoding="utf-8")


class Remembered(Generic[T]):
    """What this process has read from files: it reads them again after one of them was replaced or changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[object, T]] = {}

    def get(self, folder: Path, names: Sequence[str], read: Callable[[], T]) -> T:
        """Return what `read` returned for the folder while the named files were as they are now."""
        state = {name: _state(f"{folder}/{name}") for name in names}
        known = self._known.get(folder)
        if known is None or known[0] != state:
            known = self._known[folder] = (state, read())
        return known[1]


def _state(path: str) -> tuple[int, ...] | None:
    """Return the inode, the size and the time of change of a file; None without one."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


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
    write_text(path, json.dumps(json_data(value), indent=1, allow_nan=False) + "\n")


SIZE_LIMIT = 256 * 2**20  # bytes of a file, unless the caller gives another limit
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class DamagedFileError(UserError):
    """A file cannot be read or its content is not valid."""


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading. A FIFO, which would block, a device or a folder raises DamagedFileError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise DamagedFileError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedFileError(f"{path} cannot be read: not a regular file")
    return open(descriptor, "rb")


def read_bytes(path: Path, limit: int = SIZE_LIMIT) -> bytes:
    """Return the content of a regular file of at most `limit` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise DamagedFileError(f"{path} cannot be read: larger than {limit:,} bytes")
        try:
            return file.read()
        except OSError as error:
            raise DamagedFileError(f"{path} cannot be read: {error.strerror}") from error


def read_text(path: Path, limit: int = SIZE_LIMIT) -> str:
    """Return the content of a file in UTF-8. Line ends are as in Python's text files."""
    text = _decode(read_bytes(path, limit), path)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, limit: int = SIZE_LIMIT) -> Any:
    """Return the JSON value in a file."""
    return parse_json(read_bytes(path, limit), path)


def parse_json(content: bytes | str, where: Path | str) -> Any:
    """Return the JSON value in `content`: its numbers are finite, its strings valid Unicode.

    where: the file, or the file and line, for the message.
    """
    text = _decode(content, where) if isinstance(content, bytes) else content
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate raises ValueError
    except RecursionError as error:
        raise DamagedFileError(f"{where} cannot be read: nested too deeply") from error
    except ValueError as error:
        raise DamagedFileError(f"{where} cannot be read: not valid JSON: {error}") from error
    return value


def _decode(content: bytes, where: Path | str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{where} cannot be read: not UTF-8 text at byte {error.start}") from error


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:30]} is out of range")
    return value
