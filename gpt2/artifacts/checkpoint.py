"""Checkpoints that are whole or not there.

    <run>/checkpoint/00001200/state.pt       tensors (model, optimizer), read back with weights_only=True
                              meta.json      plain data: iteration, clocks, history
                              manifest.json  size and SHA-256 of the others, written last

A checkpoint is made under a temporary name, flushed to the disk, and renamed; the one before stays. Loading
takes the newest that is whole and says why it passed over any other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpt2.system.errors import UserError

KEEP = 2
NAME = re.compile(r"[0-9]+(\.[0-9]+)?")
STATE, META, MANIFEST = "state.pt", "meta.json", "manifest.json"


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be written or is not whole."""


@dataclass
class Loaded:
    """The newest whole checkpoint: tensors on the CPU, plain data, and what was passed over to reach it."""

    iteration: int
    state: dict[str, Any]
    meta: dict[str, Any]
    passed_over: list[str] = field(default_factory=list)


def save(root: Path, iteration: int, state: dict[str, Any], meta: dict[str, Any], keep: int = KEEP) -> Path:
    """Write the checkpoint of `iteration` under `root`, then drop all but the newest `keep`.

    Raises CheckpointError (disk full, read-only); the checkpoints before are untouched then.
    """
    final = _free_name(root, iteration)
    temporary = root / f".{final.name}.{os.getpid()}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        temporary.mkdir()
        with (temporary / STATE).open("wb") as file:  # a file of Python's tells what went wrong with it
            torch.save(state, file)
        (temporary / META).write_text(json.dumps(meta | {"iteration": iteration}))
        sums = {name: _describe(temporary / name) for name in (STATE, META)}
        (temporary / MANIFEST).write_text(json.dumps({"schema": 1, "files": sums}, indent=1))
        for name in (STATE, META, MANIFEST):
            _flush(temporary / name)
        _flush(temporary)
        temporary.rename(final)
        _flush(root)
    except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in a RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {final} could not be written: {error}; free space and run `make`"
        ) from error
    _remove_leftovers(root)
    for path in complete(root):
        if _place(path)[0] > iteration:  # passed over as damaged when this run went on from an earlier one
            shutil.rmtree(path)
    keep_newest(root, keep)
    return final


def _free_name(root: Path, iteration: int) -> Path:
    """A name that is not taken: an iteration that is saved again, with newer clocks, never touches the one before."""
    taken = [_place(path)[1] for path in complete(root) if _place(path)[0] == iteration]
    return root / (f"{iteration:08d}.{max(taken) + 1}" if taken else f"{iteration:08d}")


def _place(path: Path) -> tuple[int, int]:
    """(iteration, how often it was saved before) from a checkpoint's name."""
    iteration, _, again = path.name.partition(".")
    return int(iteration), int(again or 0)


def keep_newest(root: Path, keep: int = 1) -> None:
    """Remove all checkpoints but the newest `keep`: a finished run needs one."""
    for old in complete(root)[:-keep]:
        shutil.rmtree(old)


def complete(root: Path) -> list[Path]:
    """The checkpoints under `root` that were renamed into place, oldest first; their content is not checked."""
    found = (path for path in root.glob("[0-9]*") if path.is_dir() and NAME.fullmatch(path.name))
    return sorted(found, key=_place)


def load(path: Path) -> Loaded:
    """Verify and read one checkpoint; CheckpointError names the file that is missing, short or altered."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        for name in (STATE, META):
            seen = _describe(path / name)
            if seen != files[name]:
                raise CheckpointError(
                    f"checkpoint {path / name} is altered: {seen['bytes']} bytes, SHA-256 {seen['sha256'][:12]}..., "
                    f"manifest says {files[name]['bytes']} bytes, {files[name]['sha256'][:12]}..."
                )
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        meta = json.loads((path / META).read_text())
    except CheckpointError:
        raise
    except (
        Exception
    ) as error:  # a damaged file can fail in any way; the one before is the answer to all of them
        raise CheckpointError(f"checkpoint {path} is not whole: {type(error).__name__}: {error}") from error
    return Loaded(int(meta["iteration"]), state, meta)


def load_latest(root: Path) -> Loaded | None:
    """The newest whole checkpoint under `root`, or None; damaged ones are passed over and named."""
    passed_over: list[str] = []
    for path in reversed(complete(root)):
        try:
            loaded = load(path)
        except CheckpointError as error:
            passed_over.append(str(error))
            continue
        loaded.passed_over = passed_over
        return loaded
    if passed_over:
        raise CheckpointError(
            f"no whole checkpoint is left in {root}: {passed_over[0]}; delete the run's folder to begin it anew"
        )
    return None


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _flush(path: Path) -> None:
    """Force a file's or a folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(root: Path) -> None:
    """Temporary folders of processes that died; a run's folder has one writer only."""
    for path in root.glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
