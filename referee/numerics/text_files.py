"""Read the files of text that users bring: one rule for every reader.

A file is UTF-8. A byte-order mark at its start is no text. Only a line feed ends a line of JSON. In every text, in
strings of JSON and of parquet too, "\r\n" and "\r" are read as "\n", and half of a surrogate pair as U+FFFD.
UserError names the file, the line and the fix. Standard library only.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from referee.errors import NumericsError, UserError

if TYPE_CHECKING:
    from torch import Tensor


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


# Write a record: step0/rank0/{dump,stack,construct}.json and dump_tensor_data/, named as msProbe's.


DUMP, STACK, CONSTRUCT, TENSORS = "dump.json", "stack.json", "construct.json", "dump_tensor_data"


def read_dump_json(path: str | os.PathLike[str], fix: str) -> Any:
    """Return the content of a JSON file. NumericsError names the path, the reason and the fix."""
    try:
        return read_json(Path(path))
    except UserError as error:
        raise NumericsError(f"{error}".partition("; fix")[0] + f"; fix: {fix}") from error


@contextlib.contextmanager
def writing(path: Path, fix: str) -> Iterator[None]:
    """Replace an OSError by a NumericsError that names the file or folder that cannot be written. path: by default."""
    try:
        yield
    except OSError as error:
        name = Path(error.filename2 or error.filename or path)
        reason = error.strerror
        if isinstance(error, FileExistsError | NotADirectoryError):
            name = next((parent for parent in (name, *name.parents) if parent.is_file()), name)
            reason = "it is not a folder"
        raise NumericsError(f"{name} cannot be written: {reason}; fix: {fix}") from error


def create_folder(path: Path) -> None:
    """Create a folder of results, before work that takes long. NumericsError where it cannot be written."""
    with writing(path, "give another folder for the results"):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file and move it to path, which is then complete or as before. OSError names path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, content: Any) -> None:
    """Write a file that is complete or absent. NaN and Infinity are written as Python's json does."""
    _write_text(path, json.dumps(content, indent=1))


def finite(value: Any) -> Any:
    """Return None in place of NaN and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _lines(content: Mapping[str, Any]) -> str:
    """Return JSON with one line an entry. json's indent is ten times slower, which is a share of a recorded step."""
    entries = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
    return "{\n" + ",\n".join(entries) + "\n}"


def this_rank() -> int:
    """Return the rank of this process: of torch.distributed, else of torchrun's environment, else 0."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def write_record(
    folder: Path,
    head: Mapping[str, Any],
    data: Mapping[str, Any],
    stacks: Mapping[str, Sequence[str]],
    parents: Mapping[str, str | None],
    tensors: Mapping[str, Tensor],
) -> None:
    """Write the record of one rank, in place of an earlier one.

    stacks: call -> its callers; written once for all calls that have the same.
    """
    shutil.rmtree(folder / TENSORS, ignore_errors=True)
    if tensors:
        import torch  # here, because reading JSON needs none

        (folder / TENSORS).mkdir(parents=True)
        for name, tensor in tensors.items():
            torch.save(tensor.cpu(), folder / TENSORS / name)
    grouped: dict[tuple[str, ...], list[str]] = {}
    for name, lines in stacks.items():
        grouped.setdefault(tuple(lines), []).append(name)
    numbered = {str(number): [names, list(lines)] for number, (lines, names) in enumerate(grouped.items())}
    _write_text(folder / STACK, _lines(numbered))
    _write_text(folder / CONSTRUCT, _lines(parents))
    head = {**head, "dump_data_dir": str(folder / TENSORS) if tensors else None}
    _write_text(folder / DUMP, f'{_lines(head).removesuffix("}").rstrip()},\n"data": {_lines(data)}\n}}')
