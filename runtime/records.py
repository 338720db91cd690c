"""Read and write the JSON files of a study and its runs: msgspec structs, each file with its SHA-256.

    {"of": "STUDY/RUN", ..., "sha256": "<SHA-256 of the file without these 64 digits>"}

The annotations of a struct are its schema: a field without a default is required, an unknown key is refused. A file
without a checksum is damaged. A finished run has SHA256SUMS over its files.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

import msgspec

from referee.verdict.rows import Row
from runtime import files
from runtime.files import DamagedFileError, parse_json, read_bytes, read_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Task = Literal["gpt2", "grpo"]  # what a run trains

MARK, DIGITS = b'"sha256": "', 64
SUMS = "SHA256SUMS"
ROWS, ITEMS = "rows.jsonl", "items"


class InvalidJsonError(ValueError):
    """A JSON value does not have the type. The message names its path."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the structs."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields."""
        return msgspec.structs.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        plain: dict[str, Any] = to_plain(self)
        return plain


def to_plain(value: Any) -> Any:
    """Return plain JSON data: lists for tuples, see `files.json_data`."""
    return files.json_data(msgspec.to_builtins(value, enc_hook=_plain))


def _plain(value: Any) -> str:
    """Return a path, or a subclass of str such as torch's version, as str."""
    if isinstance(value, str | Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def parse(kind: type[T], value: Any, where: str) -> T:
    """Return plain JSON data as `kind`. InvalidJsonError names the first part of another type. where: its path."""
    try:
        return msgspec.convert(value, kind, dec_hook=lambda custom, text: custom(text))  # a path
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `")
        raise InvalidJsonError(f"{where}{path.strip('`$')}: {reason}") from error


def write(path: Path, value: Record | Mapping[str, Any], of: str = "", indent: int | None = 1) -> None:
    """Replace the file atomically by `value` with its checksum. of: the study, or the study and the run: "a/B0"."""
    content = to_plain(value)
    assert not {"of", "sha256"} & content.keys(), "these names are of the file"
    plain = {"of": of} | content | {"sha256": ""}
    head, mark, tail = (json.dumps(plain, indent=indent) + "\n").encode().rpartition(MARK)
    files.write_bytes(path, head + mark + _digest(head + mark + tail).encode() + tail)


def read_plain(path: Path, of: str | None = None) -> dict[str, Any]:
    """Return the content of a file that `write` wrote. DamagedFileError for any defect but a missing file.

    of: the study or run that it belongs to; None accepts any.
    """
    content = read_bytes(path)
    value = parse_json(content, path)
    head, mark, rest = content.rpartition(MARK)
    if not mark or not isinstance(value, dict) or "sha256" not in value:
        raise DamagedFileError(f"{path} is damaged: it has no checksum")
    actual, recorded = _digest(head + mark + rest[DIGITS:]), rest[:DIGITS].decode(errors="replace")
    if actual != recorded:
        raise DamagedFileError(f"{path} was altered: SHA-256 is {actual[:12]}; it records {recorded[:12]}")
    owner = value.pop("of", None)
    if of is not None and owner != of:
        raise DamagedFileError(f"{path} belongs to {owner}, not to {of}")
    del value["sha256"]
    return value


def read(kind: type[T], path: Path, of: str | None = None) -> T:
    """Return the content of a file as `kind`. DamagedFileError for any defect but a missing file."""
    try:
        return parse(kind, read_plain(path, of), "content")
    except InvalidJsonError as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from error


def write_rows(folder: Path, rows: Iterable[Row]) -> None:
    """Replace rows.jsonl in the folder. A value that is not finite has no row."""
    finite = [row for row in rows if math.isfinite(row.value)]
    files.write_bytes(folder / ROWS, msgspec.json.Encoder().encode_lines(finite))


def read_rows(folder: Path, run: tuple[str, str, int]) -> tuple[Row, ...]:
    """Return the rows in the folder; none where there is no file. DamagedFileError for a row of another run.

    run: study, arm and seed.
    """
    path = folder / ROWS
    try:
        rows = msgspec.json.Decoder(Row).decode_lines(read_bytes(path))
    except FileNotFoundError:
        return ()
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from error
    for row in rows:
        if (row.study, row.arm, row.seed) != run:
            raise DamagedFileError(f"{path} has a row of {row.study}, {row.arm}, seed {row.seed}")
    return tuple(rows)


def items_path(folder: Path, row: Row) -> Path:
    """Return the file with the values of the single items of a row, such as items/acc_norm-hellaswag.npy."""
    return folder / ITEMS / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', f'{row.metric}-{row.dataset}')}.npy"


def write_items(folder: Path, row: Row, values: ArrayLike) -> Row:
    """Write the values of the single items of a row; return the row with their number."""
    import numpy as np

    content, array = io.BytesIO(), np.asarray(values)
    np.save(content, array, allow_pickle=False)
    path = items_path(folder, row)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, content.getvalue())
    return row.replace(items=len(array))


def read_items(folder: Path, row: Row) -> np.ndarray | None:
    """Return the values of the single items of a row; None where there are none, or as many as the row has not."""
    import numpy as np

    try:
        values = np.load(io.BytesIO(read_bytes(items_path(folder, row))), allow_pickle=False)
    except (FileNotFoundError, DamagedFileError, ValueError, EOFError):
        return None
    return values.astype(float) if len(values) == row.items else None


def owner(run_dir: Path) -> str:
    """Return what the files of a run say that they belong to: the names of the study's folder and of the run."""
    return f"{run_dir.resolve().parents[1].name}/{run_dir.name}"


def digest(path: Path) -> str:
    """Return the SHA-256 of a regular file. DamagedFileError where it cannot be read."""
    with files.open_regular(path) as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DamagedFileError(f"{path} cannot be read: {error.strerror}") from error


def write_sums(run_dir: Path, of: str, names: Iterable[str]) -> None:
    """Write SHA256SUMS over the named files that exist, in the form that `sha256sum -c` reads."""
    lines = [f"{digest(run_dir / name)}  {name}" for name in names if (run_dir / name).exists()]
    files.write_text(run_dir / SUMS, "\n".join([f"# {of}", *lines]) + "\n")


def check_sums(run_dir: Path, of: str, names: Iterable[str], unread: str = "") -> list[str]:
    """Return a message for every file of a finished run that is not as SHA256SUMS says.

    names: the files that SHA256SUMS must list where they exist. unread: folder whose files are not read.
    """
    try:
        owner, *lines = read_text(run_dir / SUMS).removesuffix("\n").split("\n")
        sums = {name: value for value, name in (line.split("  ", 1) for line in lines)}
    except FileNotFoundError:
        return [f"{SUMS} is missing"]
    except (DamagedFileError, ValueError):
        return [f"{SUMS} is damaged"]
    if owner != f"# {of}":
        return [f"{SUMS} belongs to {owner.removeprefix('# ')}, not to {of}"]
    unlisted = [name for name in names if name not in sums and (run_dir / name).exists()]
    messages = [f"{name} is not in {SUMS}" for name in unlisted]
    for name, recorded in sums.items():
        if unread and name.startswith(f"{unread}/"):
            continue
        try:
            actual = digest(run_dir / name)
        except FileNotFoundError:
            actual = "missing"
        except DamagedFileError as error:
            messages.append(f"{error}")
            continue
        if actual != recorded:
            messages.append(f"{name}: SHA-256 is {actual[:12]}; {SUMS} has {recorded[:12]}")
    return messages


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
