"""Check that two studies are comparable, row by row, with the recorded values.

A row is equal, harmless (it differs, and the reason says why only rounding can change), fatal (the studies answer
different questions), or not recorded. The rows are data: study.compare.checklist_rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpt2.artifacts.equivalent_code import COMPUTING, changed_code
from gpt2.artifacts.provenance import FORMAT, VARIABLES
from ra.names import LEARNED
from study.compare.checklist_rows import (
    COVERED,
    EQUAL,
    FATAL,
    HARMLESS,
    HASHED,
    LEARNED_PREFIX,
    NOT_RECORDED,
    NOT_SET,
    RULES,
    WITHOUT_EFFECT,
    Rule,
    fingerprint,
)
from study.compare.load import LoadedStudy, Member

__all__ = ["EQUAL", "FATAL", "HARMLESS", "NOT_RECORDED", "Check", "blocking", "checklist"]


@dataclass(frozen=True)
class Check:
    """One row of the checklist. values: one for each study. blocks: whether the row forbids comparing losses."""

    group: str
    subject: str
    status: str
    values: tuple[str, ...]
    reason: str
    blocks: bool


def checklist(studies: Sequence[LoadedStudy]) -> list[Check]:
    """Every row over the studies, in the order of the tables."""
    checks = [_names(studies, "variants"), _names(studies, "seeds")]
    checks += [check for row in RULES if (check := _row(row, studies))]
    checks += [*_settings(studies), *_variables(studies), *_code(studies)]
    order = list(dict.fromkeys(check.group for check in checks))
    return sorted(checks, key=lambda check: order.index(check.group))


def blocking(checks: Sequence[Check]) -> list[Check]:
    return [check for check in checks if check.blocks]


def _check(group: str, subject: str, severity: str, values: Sequence[str], reason: str) -> Check:
    return Check(group, subject, severity, tuple(values), reason, severity == FATAL)


def _names(studies: Sequence[LoadedStudy], what: str) -> Check:
    sets: list[set[Any]] = [getattr(study, what) for study in studies]
    values = [", ".join(str(name) for name in sorted(names)) or "none" for names in sets]
    if all(names == sets[0] for names in sets):
        return _check("study", what, EQUAL, values, "")
    shared = set.intersection(*sets)
    if not shared:
        return _check("study", what, FATAL, values, f"the studies share no {what.rstrip('s')}")
    return _check("study", what, HARMLESS, values, "only the common ones are compared")


def _gather(row: Rule, study: LoadedStudy) -> dict[str, set[str]]:
    """The values of the study's runs by key. A run without a value counts as not recorded, under the key ""."""
    found: dict[str, set[str]] = {}
    for member in study.members:
        for key, value in (row.read(member) or {"": NOT_RECORDED}).items():
            found.setdefault(key, set()).add(value)
    return found


def _row(row: Rule, studies: Sequence[LoadedStudy]) -> Check | None:
    """Compare the keys that all studies have. A study with several values is equal to no other."""
    found = [_gather(row, study) for study in studies]
    unknown = any(NOT_RECORDED in values for table in found for values in table.values())
    if row.recent and not any(row.read(member) for study in studies for member in study.members):
        return None
    shared = [key for key in found[0] if all(key in table for table in found)]
    differing = [
        key for key in shared if len(set.union(*(table[key] for table in found)) - {NOT_RECORDED}) > 1
    ]
    values = [_shown(table, differing or list(table)) for table in found]
    if differing:
        return _check(row.group, row.subject, row.severity, values, row.reason)
    if unknown:
        return _unknown(row, values)
    if not shared:
        return None  # no seed or variant in common: another row says so
    return _check(row.group, row.subject, EQUAL, values, "")


def _unknown(row: Rule, values: list[str]) -> Check:
    """A row without recorded values. It blocks where a difference would be fatal, except for older records."""
    older = row.subject == "float32 products"
    blocks = row.severity == FATAL and not older
    reason = "agreement cannot be shown" if blocks else row.unknown
    return Check(row.group, row.subject, NOT_RECORDED, tuple(values), reason, blocks)


def _shown(found: dict[str, set[str]], keys: Sequence[str]) -> str:
    texts = {key: " and ".join(sorted(found[key])) for key in keys if key in found}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{key} {text}".strip() for key, text in sorted(texts.items())) or "-"


def _settings(studies: Sequence[LoadedStudy]) -> list[Check]:
    """One row for each symbol of the saved settings that no other row covers."""
    configs = [[member.config for member in study.members] for study in studies]
    if not all(config is not None for group in configs for config in group):
        return _without_settings(studies)
    names = sorted(
        {name for group in configs for config in group for name in config or {} if name not in COVERED}
    )
    checks = []
    for name in names:
        found = [{_value(config or {}, name) for config in group} for group in configs]
        values = [" and ".join(sorted(group)) for group in found]
        severity, reason = _meaning(name, studies)
        equal = len(set.union(*found)) <= 1
        checks.append(
            _check("hyper-parameters", name, EQUAL if equal else severity, values, "" if equal else reason)
        )
    explained = any(check.status != EQUAL and check.subject in HASHED for check in checks)
    if not explained:
        checks.append(
            _schedule_hash(
                studies,
                "it differs although its saved settings agree: the runs were extended, or ran with other settings",
            )
        )
    return checks


def _without_settings(studies: Sequence[LoadedStudy]) -> list[Check]:
    checks = [
        _schedule_hash(studies, "the differing setting is unknown: saved settings are missing or unreadable")
    ]
    if all(LEARNED in study.variants for study in studies):
        values = [_shown({"": {"recorded" if member.config else NOT_RECORDED for member in study.members}}, [""])
                  for study in studies]  # fmt: skip
        reason = f"agreement of the settings of {LEARNED} cannot be shown"
        checks.append(
            Check("hyper-parameters", LEARNED_PREFIX + "...", NOT_RECORDED, tuple(values), reason, True)
        )
    return checks


def _value(config: dict[str, str], name: str) -> str:
    """The value of a symbol. An absent symbol is off, or hidden because its parent is off."""
    value = config.get(name, NOT_SET)
    return NOT_SET if value == "n" else value or '""'


def _meaning(name: str, studies: Sequence[LoadedStudy]) -> tuple[str, str]:
    if name in WITHOUT_EFFECT:
        return HARMLESS, WITHOUT_EFFECT[name]
    if name.startswith(LEARNED_PREFIX):
        if all(LEARNED in study.variants for study in studies):
            return FATAL, f"{LEARNED} differs between the studies"
        return HARMLESS, f"it affects {LEARNED} alone, which not all studies have"
    return FATAL, "a setting of training differs"


def _schedule_hash(studies: Sequence[LoadedStudy], reason: str) -> Check:
    row = Rule("hyper-parameters", "optimizer and budget (hash)", fingerprint("schedule"), FATAL, reason)
    check = _row(row, studies)
    assert check is not None  # every run has this entry
    return check


def _variables(studies: Sequence[LoadedStudy]) -> list[Check]:
    """One row for each environment variable that any run has."""
    subject = "environment variables"
    recorded = [[member.record.environment for member in study.members] for study in studies]
    if not all(entry for group in recorded for entry in group):
        values = ["recorded" if all(group) else NOT_RECORDED for group in recorded]
        reason = "older records lack the variables that change numbers, so a difference cannot be excluded"
        return [Check("environment", subject, NOT_RECORDED, tuple(values), reason, False)]
    names = sorted({name for group in recorded for entry in group if entry for name in entry.variables})
    checks = []
    for name in names:
        found = [{str(entry.variables.get(name, NOT_SET)) for entry in group if entry} for group in recorded]
        values = [" and ".join(sorted(group)) for group in found]
        changes = VARIABLES.get(name, FORMAT)
        if len(set.union(*found)) <= 1:
            checks.append(_check("environment", name, EQUAL, values, ""))
        else:
            severity = FATAL if changes == FORMAT else HARMLESS
            checks.append(_check("environment", name, severity, values, f"it changes {changes}"))
    return checks or [_check("environment", subject, EQUAL, ["none set"] * len(studies), "")]


def _code(studies: Sequence[LoadedStudy]) -> list[Check]:
    """Compare the modules that the runs had loaded, by digest.

    Modules known to compute the same as each other count as equal (gpt2.artifacts.equivalent_code). Records without
    digests are judged by commit alone: equal if all have one commit and no uncommitted change.
    """
    shared = set.intersection(*(study.variants for study in studies))
    members = [[member for member in study.members if member.run.variant in shared] for study in studies]
    if not all(_hashes(member) for group in members for member in group):
        return [_by_commit(members)]
    planning = ("study.", "scripts.", "kconfig.", "pages.", "bench.")
    may = "the runs may compute something else"
    return [
        _modules(members, "code that computes", COMPUTING, FATAL, may),
        _modules(members, "code that plans and reports", planning, HARMLESS, "its decisions are recorded"),
    ]


def _modules(
    members: list[list[Member]], subject: str, packages: tuple[str, ...], severity: str, reason: str
) -> Check:
    """Compare the modules of some packages. A module that only some of the studies loaded counts as different."""
    loaded = [
        {
            name: digest
            for member in group
            for name, digest in _hashes(member).items()
            if name.startswith(packages)
        }
        for group in members
    ]
    found: list[set[tuple[str, str]]] = [
        {
            item
            for member in group
            for item in changed_code(_hashes(member)).items()
            if item[0].startswith(packages)
        }
        for group in members
    ]
    common = found[0].intersection(*found[1:])
    differing = sorted({name for group in found for name, _ in group - common})
    if not differing:
        return _check("code", subject, EQUAL, [f"{len(group)} modules" for group in loaded], "")
    values = [
        ", ".join(f"{name} {digest[:6]}" for name, digest in sorted(group) if name in differing) or "-"
        for group in found
    ]
    return _check("code", subject, severity, values, f"{', '.join(differing)}: {reason}")


def _hashes(member: Member) -> dict[str, str]:
    environment = member.record.environment
    return {name: str(digest) for name, digest in environment.code.items()} if environment else {}


def _mark(member: Member) -> str:
    """The commit, and whether there were uncommitted changes."""
    commit = (member.record.commit or NOT_RECORDED)[:12]
    return f"{commit} and changes" if member.record.dirty else commit


def _by_commit(members: list[list[Member]]) -> Check:
    subject = "code that computes"
    marks = [{_mark(member) for member in group} for group in members]
    values = [" and ".join(sorted(group)) or "-" for group in marks]
    known = all(
        member.record.commit and member.record.dirty is False for group in members for member in group
    )
    if known and len(set.union(*marks)) == 1:
        return _check("code", subject, EQUAL, values, "")
    reason = "it differs or is unknown, and the records have no digests of it"
    return Check("code", subject, NOT_RECORDED, tuple(values), reason, True)
