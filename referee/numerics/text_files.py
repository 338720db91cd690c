"""Read the files of text that users bring: one rule for every reader.

A file is UTF-8. A byte-order mark at its start is no text. Only a line feed ends a line of JSON. In every text, in
strings of JSON and of parquet too, "\\r\\n" and "\\r" are read as "\\n", and half of a surrogate pair as U+FFFD.
UserError names the file, the line and the fix. Standard library only.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from referee.errors import UserError

LARGEST = 2**28  # bytes of a text or a line that is held at once; its tokens need 10 times as much
PART = 2**20  # characters
BOM = codecs.BOM_UTF8
FIX = "name a file with text"
UNCLEAN = re.compile(
    r"\\(?:r|u(?:000[dD]|[dD][89a-fA-F]))"
)  # escapes of carriage returns and surrogates in JSON


def clean(text: str) -> str:
    """Return a text with line feeds as its only line ends and without halves of surrogate pairs."""
    return whole_characters(text.replace("\r\n", "\n").replace("\r", "\n"))


def whole_characters(text: str) -> str:
    """Return a text with surrogate pairs joined, and every other half of one replaced by U+FFFD, as tiktoken does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def text_parts(path: Path, most: int = PART, fix: str = FIX) -> Iterator[str]:
    """Yield a text in parts of at most `most` characters, so that a file may be larger than memory.

    fix: of a missing file.
    """
    with _open(path, fix) as raw, io.TextIOWrapper(raw, encoding="utf-8") as file:
        try:
            part = file.read(most).removeprefix(BOM.decode())
            while part:
                yield part
                part = file.read(most)
        except UnicodeDecodeError as error:
            place = raw.tell() - len(error.object) + error.start
            raise UserError(
                f"{_name(path)} is not UTF-8 text at byte {place}; fix: convert the file, or leave it out"
            ) from None


def read_text(path: Path) -> str:
    """Return a whole text. UserError for one of more than LARGEST bytes."""
    _check_size(path)
    return "".join(text_parts(path))


def read_json(path: Path) -> Any:
    """Return the value of a file that is one JSON document."""
    _check_size(path)
    with _open(path) as file:
        return _parse(file.read().removeprefix(BOM), _name(path))


def json_lines(path: Path, longest: int = LARGEST, fix: str = FIX) -> Iterator[tuple[str, Any]]:
    """Yield ("file:line", value) of every line that is not blank. longest: bytes of a line. fix: of a missing file."""
    with _open(path, fix) as file:
        for number in itertools.count(1):
            line, where = file.readline(longest + 1), f"{_name(path)}:{number}"
            if len(line) > longest:
                size = path.stat().st_size
                raise UserError(
                    f"{where} has more than {longest:,} bytes (the file has {size:,}); fix: one JSON object a line"
                )
            if number == 1:
                line = line.removeprefix(BOM)
            if line.strip():
                yield where, _parse(line, where)
            elif not line:
                return


def is_empty(path: Path) -> bool:
    """Whether a file has no text: no byte, or a byte-order mark alone."""
    return path.stat().st_size <= len(BOM) and not next(text_parts(path), "")


def _name(path: Path) -> str:
    name = os.fspath(path)
    return name if name.isprintable() else repr(name)


@contextlib.contextmanager
def _open(path: Path, fix: str = FIX) -> Iterator[io.BufferedReader]:
    """Open a regular file. UserError where that, or reading it, fails."""
    if not path.is_file():  # also a FIFO, which would block
        fact = "is not a file" if path.exists() else "does not exist"
        raise UserError(f"{_name(path)} {fact}; fix: {fix}")
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise UserError(
            f"{_name(path)} cannot be read: {error.strerror}; fix: check its permissions"
        ) from error


def _check_size(path: Path) -> None:
    size = path.stat().st_size if path.is_file() else 0
    if size > LARGEST:
        raise UserError(
            f"{_name(path)} has {size:,} bytes, and a document has at most {LARGEST:,}; fix: divide it into files, or "
            "into the lines of a .jsonl file"
        )


def _parse(content: bytes, where: str) -> Any:
    """Return the JSON value of a line or file."""
    try:
        text = content.decode()
        value = _DECODER.decode(text)
        return _cleaned(value) if UNCLEAN.search(text) else value
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8 text at byte {error.start}; fix: convert the file to UTF-8"
        ) from None
    except RecursionError:
        raise UserError(f"{where} is not JSON (nested too deep); fix: correct or remove it") from None
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); fix: correct or remove it") from None


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return {key: _cleaned(item) for key, item in value.items()} if isinstance(value, dict) else value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object of its pairs. ValueError where a key is present twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is present twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)
