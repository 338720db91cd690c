"""Write a record: step0/rank0/{dump,stack,construct}.json and dump_tensor_data/, named as msProbe's."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from referee.errors import NumericsError, UserError
from referee.numerics.text_files import read_json as read_document

if TYPE_CHECKING:
    from torch import Tensor

DUMP, STACK, CONSTRUCT, TENSORS = "dump.json", "stack.json", "construct.json", "dump_tensor_data"


def read_json(path: str | os.PathLike[str], fix: str) -> Any:
    """Return the content of a JSON file. NumericsError names the path, the reason and the fix."""
    try:
        return read_document(Path(path))
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
