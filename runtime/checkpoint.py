"""Write and read checkpoints that are complete or absent.

    <run>/checkpoint/00001200/state.pt       tensors (model, optimizer), read back with weights_only=True
                              meta.json      plain data: iteration, clocks, history
                              SHA256SUMS     of the others, written last

A checkpoint is written under a temporary name, flushed to the disk and renamed; the previous one stays. Loading takes
the newest complete checkpoint and reports why it skipped any other.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime import ranks, records
from runtime.errors import UserError, disk_full, explain_full_disk
from runtime.files import read_json, remove_files

KEEP = 2
NAME = re.compile(r"[0-9]+(\.[0-9]+)?")
TEMPORARY = re.compile(r"\.[0-9]+(\.[0-9]+)?\.[0-9]+\.tmp")
FILES = STATE, META, SUMS = "state.pt", "meta.json", records.SUMS
OWNER = "a checkpoint"  # in SHA256SUMS


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be written or is damaged."""


@dataclass
class LoadedCheckpoint:
    """A checkpoint: tensors on the CPU, plain data, and messages about damaged checkpoints that were skipped."""

    path: Path
    iteration: int
    state: dict[str, Any]
    meta: dict[str, Any]
    skipped: list[str] = field(default_factory=list)


def save(
    root: Path,
    iteration: int,
    state: dict[str, Any],
    meta: dict[str, Any],
    keep: int = KEEP,
    fence: Callable[[], None] = lambda: None,
) -> Path:
    """Write the checkpoint of `iteration` under `root`, then delete all but the newest `keep`.

    Raises CheckpointError (disk full, read-only) and leaves existing checkpoints untouched. fence: called before the
    first file and before the checkpoint gets its name; it ends this process if another one has taken the run over.
    """
    fence()
    import torch

    final = _free_name(root, iteration)
    temporary = root / f".{final.name}.{os.getpid()}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        temporary.mkdir()
        with (temporary / STATE).open("wb") as file:  # Python's file reports the cause of an error
            torch.save(state, file)
        (temporary / META).write_text(json.dumps(meta | {"iteration": iteration}))
        records.write_sums(temporary, OWNER, (STATE, META))
        for name in FILES:
            _flush(temporary / name)
        _flush(temporary)
        fence()
        temporary.rename(final)
        _flush(root)
    except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in a RuntimeError
        remove_files(temporary, FILES)
        full = disk_full(error)
        reason = (
            "; fix: ".join(explain_full_disk(full, root)) if full else f"{error}; fix: make (it tries again)"
        )
        raise CheckpointError(f"checkpoint {final} cannot be written: {reason}") from error
    _remove_leftovers(root)
    for path in complete(root):
        if _sequence(path)[0] > iteration:  # damaged: this run resumed from an earlier one
            remove_files(path, FILES)
    keep_newest(root, keep)
    return final


def _free_name(root: Path, iteration: int) -> Path:
    """Return an unused name. Saving an iteration twice, with newer clocks, leaves the first checkpoint untouched."""
    named = (path for path in root.glob(f"{iteration:08d}*") if NAME.fullmatch(path.name))
    taken = [_sequence(path)[1] for path in named]
    return root / (f"{iteration:08d}.{max(taken) + 1}" if taken else f"{iteration:08d}")


def _sequence(path: Path) -> tuple[int, int]:
    """Parse (iteration, number of earlier saves of it) from a checkpoint's name."""
    iteration, _, repeat = path.name.partition(".")
    return int(iteration), int(repeat or 0)


def keep_newest(root: Path, keep: int = 1) -> None:
    """Delete all checkpoints but the newest `keep`. A finished run needs one."""
    for old in complete(root)[:-keep]:
        remove_files(old, FILES)


def complete(root: Path) -> list[Path]:
    """Return the checkpoints under `root`, oldest first. Their content is not verified."""
    named = (path for path in root.glob("[0-9]*") if NAME.fullmatch(path.name))
    return sorted((path for path in named if any((path / file).exists() for file in FILES)), key=_sequence)


def load(path: Path) -> LoadedCheckpoint:
    """Verify and read one checkpoint. CheckpointError names the file that is missing, short or altered."""
    import torch

    meta = verify(path)
    try:
        several = ranks.world() > 1  # they share the file's pages in memory
        state = torch.load(path / STATE, map_location="cpu", weights_only=True, mmap=several)
    except Exception as error:  # the caller tries the previous one
        raise _damaged(path, error) from error
    return LoadedCheckpoint(path, meta["iteration"], state, meta)


def verify(path: Path) -> dict[str, Any]:
    """Check the SHA-256 of a checkpoint's files, and its iteration. Returns its plain data.

    Raises CheckpointError. Needs no torch.
    """
    if damage := records.check_sums(path, OWNER, (STATE, META)):
        raise CheckpointError(f"checkpoint {path} is damaged: {damage[0]}")
    try:
        meta: dict[str, Any] = read_json(path / META)
        if type(meta["iteration"]) is not int or meta["iteration"] != _sequence(path)[0]:
            raise CheckpointError(f"checkpoint {path} has iteration {meta['iteration']!r} in its {META}")
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        raise _damaged(path, error) from error
    return meta


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} is damaged: {type(error).__name__}: {error}")


def load_latest(
    root: Path, check: Callable[[LoadedCheckpoint], None] = lambda loaded: None
) -> LoadedCheckpoint | None:
    """Load the newest complete checkpoint under `root`; None if there is none. Damaged ones are skipped and named.

    check: raises CheckpointError for a checkpoint that the caller cannot use; it is skipped, too.
    """
    skipped: list[str] = []
    for path in reversed(complete(root)):
        try:
            loaded = load(path)
            check(loaded)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        loaded.skipped = skipped
        return loaded
    if skipped:
        raise CheckpointError(
            f"{root} has no complete checkpoint: {skipped[0]}; fix: delete the run's folder and run `make`"
        )
    return None


def _flush(path: Path) -> None:
    """Flush a file's or folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(root: Path) -> None:
    """Delete temporary folders of processes that died. A run's folder has one writer only."""
    for path in root.glob(".*.tmp"):
        if TEMPORARY.fullmatch(path.name):
            remove_files(path, FILES)
