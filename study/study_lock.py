"""Lock a study for one `make` at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from runtime import files
from runtime.errors import UserError
from runtime.files import DamagedFileError, read_bytes


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Lock the study's folder for one `make`; the value is the descriptor that holds the lock.

    The system drops the lock with the last process that has the descriptor, so no lock is ever stale. A training
    process that still saves after its study was killed holds the lock until it is done.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = files.open_append(directory / "lock")
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written: {error.strerror}; fix: set CONFIG_RESULTS_DIR to a writable folder"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = (content_or_none(directory / "lock") or b"").decode(
                errors="replace"
            ).strip() or "unknown"
            raise UserError(
                f"{directory} is being run by process {holder} (or by its training process, "
                "which still saves); fix: wait for it or stop it"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file.fileno()


def content_or_none(path: Path) -> bytes | None:
    """Return the content of a file, None if it is missing or cannot be read."""
    try:
        return read_bytes(path)
    except (FileNotFoundError, DamagedFileError):
        return None
