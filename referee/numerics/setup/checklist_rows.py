"""Rows of a checklist: compare one entry of two or more sides, and grade a difference.

A row is equal, or a finding of one of three grades with the reason why it matters: harmless (only rounding can
change), suspect (it may change more than rounding), fatal (the sides answer different questions). An entry that a side
lacks may be not recorded.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from referee.errors import NumericsError, described
from referee.numerics.text_files import replacing, writing

EQUAL, HARMLESS, SUSPECT, FATAL, NOT_RECORDED = "equal", "harmless", "suspect", "fatal", "not recorded"
WORST_FIRST = (FATAL, SUSPECT, NOT_RECORDED, HARMLESS, EQUAL)
NOT_SET = "not set"
NO_DIGEST = "no digest"  # in place of a tensor's digest; a reason follows
UNSHOWN = "agreement cannot be shown: the values cannot be read"


@dataclass(frozen=True)
class ChecklistRow:
    """One row. values: one for each side. blocks: whether the row forbids comparing losses.

    excludes: the variant whose losses the row forbids to compare, if it is only one.
    """

    group: str
    subject: str
    status: str
    values: tuple[str, ...]
    reason: str
    blocks: bool
    excludes: str = ""


def compare_values(
    group: str, subject: str, found: Sequence[set[str]], severity: str, reason: str
) -> ChecklistRow:
    """Compare one entry. found: the values on each side."""
    values = tuple(" and ".join(sorted(values)) or "-" for values in found)
    if any(f"digest {NO_DIGEST}" in value for value in values):
        return ChecklistRow(group, subject, NOT_RECORDED, values, UNSHOWN, False)
    if len(set.union(*found)) <= 1:
        return ChecklistRow(group, subject, EQUAL, values, "", False)
    return ChecklistRow(group, subject, severity, values, reason, severity == FATAL)


def compare_tables(
    group: str,
    sides: Sequence[Sequence[Mapping[str, str]]],
    meaning: Callable[[str], tuple[str, str]],
) -> list[ChecklistRow]:
    """Compare each name of tables. sides: the tables of each side. meaning: name -> severity and reason."""
    names = sorted({name for side in sides for table in side for name in table})
    return [
        compare_values(
            group, name, [{table.get(name, NOT_SET) for table in side} for side in sides], *meaning(name)
        )
        for name in names
    ]


def worst_first(checks: Iterable[ChecklistRow]) -> list[ChecklistRow]:
    """Sort rows by status; of one status, those that block come first."""
    return sorted(checks, key=lambda check: (WORST_FIRST.index(check.status), not check.blocks))


def counts(checks: Iterable[ChecklistRow]) -> str:
    """Count rows by status, the worst first."""
    kinds = [check.status for check in checks]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in WORST_FIRST if kind in kinds)


MEMBER, VERSION = "checklist.json", 2

Tables = dict[str, dict[str, str]]  # group -> entry -> value; a group that was not collected is absent


def write_checklist(tables: Tables, path: str | os.PathLike[str]) -> None:
    """Write the zip, complete or not at all."""
    path = Path(path)
    entry = zipfile.ZipInfo(MEMBER, (1980, 1, 1, 0, 0, 0))
    entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3  # the same on every system
    with (
        writing(path, "name another file"),
        replacing(path) as temporary,
        zipfile.ZipFile(temporary, "w") as archive,
    ):
        archive.writestr(entry, json.dumps({"version": VERSION, **tables}, indent=1, sort_keys=True))


def read_checklist(path: str | os.PathLike[str]) -> Tables:
    """Read a zip of write_checklist. NumericsError where it is none, is damaged, or is of another version."""
    if Path(path).exists() and not Path(path).is_file():
        raise NumericsError(f"{path} is not a file; fix: give the zip of ConfigChecker")
    try:
        with zipfile.ZipFile(path) as archive:
            tables = json.loads(archive.read(MEMBER))
        if tables.pop("version") != VERSION:
            raise ValueError(f"its version is not {VERSION}")
        for name, table in tables.items():
            if not all(isinstance(text, str) for text in table.values()):
                raise ValueError(f"{name[:40]} is no table of texts")
        return dict(tables)
    except OSError as error:
        raise NumericsError(
            f"{path} cannot be read: {error.strerror or error}; fix: check its path"
        ) from error
    except Exception as error:  # zipfile and json raise many kinds for a damaged file
        raise NumericsError(
            f"{path} is not a usable zip of check-config: {described(error)}; fix: pack it again: "
            "python -m referee check-config pack"
        ) from error
