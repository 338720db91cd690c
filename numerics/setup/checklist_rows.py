"""Rows of a checklist: compare one entry of two or more sides, and grade a difference.

A row is equal, or a finding of one of three grades with the reason why it matters: harmless (only rounding can
change), suspect (it may change more than rounding), fatal (the sides answer different questions). An entry that a side
lacks may be not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pages.markup import Detail, Strong, Text

EQUAL, HARMLESS, SUSPECT, FATAL, NOT_RECORDED = "equal", "harmless", "suspect", "fatal", "not recorded"
WORST_FIRST = (FATAL, SUSPECT, NOT_RECORDED, HARMLESS, EQUAL)
NOT_SET = "not set"
NO_DIGEST = "no digest"  # in place of a tensor's digest; a reason follows
UNSHOWN = "agreement cannot be shown: the values cannot be read"
LISTED = 4  # names in one cell

Record = TypeVar("Record")


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


@dataclass(frozen=True)
class EntryRule(Generic[Record]):
    """One entry to compare. read: its value, None where the record lacks it. severity: of a difference.

    by: the kind of key (such as "seed") for an entry that may differ between keys. unknown: the reason shown where an
    entry that does not block is not recorded. optional: the row is left out where no record has the
    entry. unknown_blocks: whether a fatal entry also blocks where it is not recorded.
    """

    group: str
    subject: str
    read: Callable[[Record], Any]
    severity: str
    reason: str
    by: str = ""
    unknown: str = "only the losses can show a difference"
    optional: bool = False
    unknown_blocks: bool = True


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
    absent: str = NOT_SET,
) -> list[ChecklistRow]:
    """Compare each name of tables. sides: the tables of each side. meaning: name -> severity and reason."""
    names = sorted({name for side in sides for table in side for name in table})
    return [
        compare_values(
            group, name, [{table.get(name, absent) for table in side} for side in sides], *meaning(name)
        )
        for name in names
    ]


def apply_rule(
    rule: EntryRule[Record], sides: Sequence[Iterable[tuple[Mapping[str, str], Record]]]
) -> ChecklistRow | None:
    """Compare the keys that all sides have. A side with several values is equal to no other.

    sides: for each record of a side, its keys by kind, and the record.
    """
    found: list[dict[str, set[str]]] = []  # of each side: key -> values
    for side in sides:
        table: dict[str, set[str]] = {}
        for keys, record in side:
            value = rule.read(record)
            key = keys[rule.by] if rule.by else ""
            table.setdefault(key, set()).add(NOT_RECORDED if value is None else str(value))
        found.append(table)
    every = set().union(*(values for table in found for values in table.values()))
    shared = set.intersection(*(set(table) for table in found))
    differing = {
        key for key in shared if len(set.union(*(table[key] for table in found)) - {NOT_RECORDED}) > 1
    }
    values = tuple(_shown(table, differing or set(table)) for table in found)
    if rule.optional and every == {NOT_RECORDED}:
        return None
    if differing:
        return ChecklistRow(
            rule.group, rule.subject, rule.severity, values, rule.reason, rule.severity == FATAL
        )
    if NOT_RECORDED in every:
        blocks = rule.severity == FATAL and rule.unknown_blocks
        reason = "agreement cannot be shown" if blocks else rule.unknown
        return ChecklistRow(rule.group, rule.subject, NOT_RECORDED, values, reason, blocks)
    # Without a common key, the row of the keys reports it.
    return ChecklistRow(rule.group, rule.subject, EQUAL, values, "", False) if shared else None


def _shown(table: dict[str, set[str]], keys: set[str]) -> str:
    texts = {key: " and ".join(sorted(table[key])) for key in sorted(keys & table.keys())}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{key} {text}".strip() for key, text in texts.items()) or "-"


def listed(names: Sequence[str], most: int = LISTED) -> str:
    """Join names; of many, the first ones and the number of the others."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more]) or "-"


def by_group(checks: Sequence[ChecklistRow]) -> list[ChecklistRow]:
    """Sort rows by group, groups in the order of their first row."""
    order = list(dict.fromkeys(check.group for check in checks))
    return sorted(checks, key=lambda check: order.index(check.group))


def worst_first(checks: Iterable[ChecklistRow]) -> list[ChecklistRow]:
    """Sort rows by status; of one status, those that block come first."""
    return sorted(checks, key=lambda check: (WORST_FIRST.index(check.status), not check.blocks))


def counts(checks: Iterable[ChecklistRow]) -> str:
    """Count rows by status, the worst first."""
    kinds = [check.status for check in checks]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in WORST_FIRST if kind in kinds)


def status_text(check: ChecklistRow) -> Text:
    """The status of a row with its reason, for a table."""
    status = Strong(FATAL, bad=True) if check.status == FATAL else check.status
    return (status, Detail(f"({check.reason})")) if check.reason else status
