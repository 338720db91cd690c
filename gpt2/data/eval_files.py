"""Find the files of CONFIG_EVAL_SETS. Standard library only, so that `make defconfig` can check them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gpt2.config.eval_sets import EvalSet
from gpt2.data.sources import SUFFIXES, DataError, local_files

SYMBOL = "CONFIG_EVAL_SETS"
TEXT_SUFFIXES = (*SUFFIXES, ".raw", ".tokens")


def check_files(sets: Sequence[EvalSet]) -> None:
    """Raise DataError for a set whose files do not exist, are of an unknown kind, or are all empty."""
    for one in sets:
        if one.pattern:
            files_of(one)


def files_of(one: EvalSet) -> list[Path]:
    """Return the files of a set, sorted. DataError as in `check_files`."""
    files = local_files((one.pattern,), f"{SYMBOL}: {one.name}", TEXT_SUFFIXES)
    if not any(path.stat().st_size for path in files):
        raise DataError(
            f"{SYMBOL}: {one.name}: {os.fspath(files[0])!r} is empty; fix: name a file with text, or leave the set out"
        )
    return files
