"""Describe the error that ended a run, for its record."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from gpt2.system.ranks import RankLostError
from gpt2.system.resource_errors import (
    disk_full,
    explain_full_disk,
    explain_missing_compiler,
    out_of_memory,
)


class Failure(NamedTuple):
    """Status of the run, its error (None where the run can continue as it is), and a note."""

    status: str
    error: str | None
    note: str | None


def describe_failure(error: Exception, directory: Path, micro: int) -> Failure:
    """Return the failure of a run in `directory`, at this micro-batch.

    After a full disk or the loss of another rank the run counts as interrupted.
    """
    if number := disk_full(error):
        return Failure("interrupted", None, explain_full_disk(number, directory)[0])
    if isinstance(error, RankLostError):
        return Failure("interrupted", None, f"{error}".partition("; fix")[0])
    if out_of_memory(error):
        return Failure("failed", f"out of memory at micro-batch {micro}: {error}", None)
    explained = explain_missing_compiler(error)
    return Failure("failed", explained or f"{type(error).__name__}: {error}", None)
