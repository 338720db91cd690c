"""Check that two studies are comparable, row by row, with the recorded values.

A row is equal, harmless (it differs, and the reason says why only rounding can change), fatal (the studies answer
different questions), or not recorded. The rows are data: study.compare.checklist_rows.
"""

from __future__ import annotations

import dataclasses
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
    NUMBER_CHANGES,
    RULES,
    WITHOUT_EFFECT,
    Rule,
    fingerprint,
)
from study.compare.load import LoadedStudy, Member

__all__ = ["EQUAL", "FATAL", "HARMLESS", "NOT_RECORDED", "Check", "blocking", "checklist"]

PLANNING = ("study.", "scripts.", "kconfig.", "pages.", "bench.")
LISTED = 4  # modules that a check names


@dataclass(frozen=True)
class Check:
    """One row of the checklist. values: one for each study. blocks: whether the row forbids comparing losses.

    excludes: the variant whose losses the row forbids to compare, if it is only one.
    """

    group: str
    subject: str
    status: str
    values: tuple[str, ...]
    reason: str
    blocks: bool
    excludes: str = ""

    @property
    def evidence(self) -> str:
        """The values of all studies in brackets; empty for modules of code, which the reason names."""
        return "" if self.group == "code" and self.status == FATAL else f" ({' | '.join(self.values)})"


def checklist(studies: Sequence[LoadedStudy]) -> list[Check]:
    """Check every entry, in the order of the groups."""
    checks = [_common(studies, "variants"), _common(studies, "seeds")]
    checks += [check for rule in RULES if (check := _apply(rule, studies))]
    checks += [*_settings(studies), *_variables(studies), *_code(studies)]
    order = list(dict.fromkeys(check.group for check in checks))
    return sorted(checks, key=lambda check: order.index(check.group))


def blocking(checks: Sequence[Check]) -> list[Check]:
    return [check for check in checks if check.blocks]


def _compare(group: str, subject: str, found: Sequence[set[str]], severity: str, reason: str) -> Check:
    """Compare one entry. found: the values in each study."""
    values = tuple(" and ".join(sorted(values)) or "-" for values in found)
    if len(set.union(*found)) <= 1:
        return Check(group, subject, EQUAL, values, "", False)
    return Check(group, subject, severity, values, reason, severity == FATAL)


def _common(studies: Sequence[LoadedStudy], kind: str) -> Check:
    """Compare the variants or the seeds of the studies."""
    sets: list[set[Any]] = [getattr(study, kind) for study in studies]
    texts = [{", ".join(str(name) for name in sorted(names)) or "none"} for names in sets]
    if set.intersection(*sets):
        return _compare("study", kind, texts, HARMLESS, "only the common ones are compared")
    return _compare("study", kind, texts, FATAL, f"the studies share no {kind.rstrip('s')}")


def _apply(rule: Rule, studies: Sequence[LoadedStudy]) -> Check | None:
    """Compare the keys that all studies have. A study with several values is equal to no other."""
    if rule.recent and not any(rule.read(member) for study in studies for member in study.members):
        return None
    found: list[dict[str, set[str]]] = [{} for _ in studies]
    for table, study in zip(found, studies, strict=True):
        for member in study.members:
            for key, value in (rule.read(member) or {"": NOT_RECORDED}).items():
                table.setdefault(key, set()).add(value)
    unknown = any(NOT_RECORDED in values for table in found for values in table.values())
    shared = set.intersection(*(set(table) for table in found))
    differing = {
        key for key in shared if len(set.union(*(table[key] for table in found)) - {NOT_RECORDED}) > 1
    }
    values = tuple(_shown(table, differing or set(table)) for table in found)
    if differing:
        return Check(rule.group, rule.subject, rule.severity, values, rule.reason, rule.severity == FATAL)
    if unknown:
        # Older records lack the setting of float32 products.
        blocks = rule.severity == FATAL and rule.subject != "float32 products"
        reason = "agreement cannot be shown" if blocks else rule.unknown
        return Check(rule.group, rule.subject, NOT_RECORDED, values, reason, blocks)
    # Without a common seed or variant, that check reports it.
    return Check(rule.group, rule.subject, EQUAL, values, "", False) if shared else None


def _shown(table: dict[str, set[str]], keys: set[str]) -> str:
    texts = {key: " and ".join(sorted(table[key])) for key in keys & table.keys()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{key} {text}".strip() for key, text in sorted(texts.items())) or "-"


def _settings(studies: Sequence[LoadedStudy]) -> list[Check]:
    """Compare each symbol of the saved settings that no rule covers, and the hash of the schedule."""
    group, checks = "hyper-parameters", []
    configs = [[member.config for member in study.members] for study in studies]
    if all(config is not None for study in configs for config in study):
        names = {name for study in configs for config in study for name in config or {}} - set(COVERED)
        for name in sorted(names):
            found = [{_value(config or {}, name) for config in study} for study in configs]
            checks.append(_compare(group, name, found, *_meaning(name, studies)))
        if any(check.status != EQUAL and check.subject in HASHED for check in checks):
            return checks  # they explain the hash
        reason = (
            "it differs although its saved settings agree: the runs were extended, or ran with other settings"
        )
    else:
        reason = "the differing setting is unknown: saved settings are missing or unreadable"
        if all(LEARNED in study.variants for study in studies):
            values = tuple("recorded" if all(study) else NOT_RECORDED for study in configs)
            unknown = f"agreement of the settings of {LEARNED} cannot be shown"
            checks.append(Check(group, LEARNED_PREFIX + "...", NOT_RECORDED, values, unknown, True))
    hashed = _apply(
        Rule(group, "optimizer and budget (hash)", fingerprint("schedule"), FATAL, reason), studies
    )
    return [*checks, hashed] if hashed else checks


def _value(config: dict[str, str], name: str) -> str:
    """Return the value of a symbol. An absent symbol is off, or hidden because its parent is off."""
    value = config.get(name, NOT_SET)
    return NOT_SET if value == "n" else value or '""'


def _meaning(name: str, studies: Sequence[LoadedStudy]) -> tuple[str, str]:
    """Return the severity of a differing symbol and the reason."""
    if name in WITHOUT_EFFECT:
        return HARMLESS, WITHOUT_EFFECT[name]
    if name.startswith(LEARNED_PREFIX):
        if all(LEARNED in study.variants for study in studies):
            return FATAL, f"{LEARNED} differs between the studies"
        return HARMLESS, f"it affects {LEARNED} alone, which not all studies have"
    return FATAL, "a setting of training differs"


def _variables(studies: Sequence[LoadedStudy]) -> list[Check]:
    """Compare each environment variable that any run has."""
    group, subject = "environment", "environment variables"
    recorded = [[member.record.environment for member in study.members] for study in studies]
    if not all(entry for study in recorded for entry in study):
        values = tuple("recorded" if all(study) else NOT_RECORDED for study in recorded)
        reason = "older records lack the variables that change numbers, so a difference cannot be excluded"
        return [Check(group, subject, NOT_RECORDED, values, reason, False)]
    checks = []
    for name in sorted({name for study in recorded for entry in study if entry for name in entry.variables}):
        found = [{str(entry.variables.get(name, NOT_SET)) for entry in study if entry} for study in recorded]
        changes = VARIABLES.get(name, FORMAT)
        severity = FATAL if changes == FORMAT else HARMLESS
        checks.append(_compare(group, name, found, severity, f"it changes {changes}"))
    return checks or [_compare(group, subject, [{"none set"} for _ in studies], EQUAL, "")]


def _code(studies: Sequence[LoadedStudy]) -> list[Check]:
    """Compare the modules that the runs had loaded, by digest.

    Modules that compute the same count as equal (gpt2.artifacts.equivalent_code). Records without digests are compared
    by commit: equal if all have one commit and no uncommitted change. A variant whose code differs is excluded if the
    code of another variant is equal.
    """

    def runs(variants: set[str]) -> list[list[Member]]:
        return [[member for member in study.members if member.run.variant in variants] for study in studies]

    shared = set.intersection(*(study.variants for study in studies))
    members, meaning = runs(shared), "the runs may compute something else"
    if not all(_digests(member) for study in members for member in study):
        return [_commits(members)]
    alone = {name: _modules(runs({name}), f"code of {name}", COMPUTING, FATAL, meaning) for name in shared}
    equal = {name for name, check in alone.items() if check.status == EQUAL}
    checks = [
        dataclasses.replace(alone[name], blocks=False, excludes=name)
        for name in sorted(shared - equal)
        if equal
    ]
    return [
        *checks,
        _modules(runs(equal or shared), "code that computes", COMPUTING, FATAL, meaning),
        _modules(members, "code that plans and reports", PLANNING, HARMLESS, "its decisions are recorded"),
    ]


def _modules(
    members: list[list[Member]], subject: str, packages: tuple[str, ...], severity: str, reason: str
) -> Check:
    """Compare the modules of some packages. A module that only some of the studies loaded counts as different."""
    changed = [
        {
            (name, digest[:6])
            for member in study
            for name, digest in _changes(member).items()
            if name.startswith(packages)
        }
        for study in members
    ]
    common = set.intersection(*changed)
    differing = sorted({name for study in changed for name, _ in study - common})
    if differing:
        values = [
            _listed([f"{name} {digest}" for name, digest in sorted(study - common)]) for study in changed
        ]
        return Check(
            "code", subject, severity, tuple(values), f"{_listed(differing)}: {reason}", severity == FATAL
        )
    loaded = [
        {name for member in study for name in _digests(member) if name.startswith(packages)}
        for study in members
    ]
    return Check("code", subject, EQUAL, tuple(f"{len(names)} modules" for names in loaded), "", False)


def _listed(names: list[str]) -> str:
    """Join names; of many, the first ones and the number of the others."""
    more = [f"and {len(names) - LISTED} more"] if len(names) > LISTED else []
    return ", ".join([*names[:LISTED], *more]) or "-"


def _changes(member: Member) -> dict[str, str]:
    """Return the modules of a run that compute other numbers than the present ones."""
    return changed_code(_digests(member), NUMBER_CHANGES.get(member.run.variant, {}))


def _digests(member: Member) -> dict[str, str]:
    environment = member.record.environment
    return {name: str(digest) for name, digest in environment.code.items()} if environment else {}


def _commits(members: list[list[Member]]) -> Check:
    """Compare commits. Code without digests is equal only if one clean commit made all runs."""
    marks = [
        {
            f"{(member.record.commit or NOT_RECORDED)[:12]}{' and changes' if member.record.dirty else ''}"
            for member in study
        }
        for study in members
    ]
    clean = all(
        member.record.commit and member.record.dirty is False for study in members for member in study
    )
    check = _compare("code", "code that computes", marks, NOT_RECORDED, "")
    if clean and check.status == EQUAL:
        return check
    reason = "it differs or is unknown, and the records have no digests of it"
    return dataclasses.replace(check, status=NOT_RECORDED, reason=reason, blocks=True)
