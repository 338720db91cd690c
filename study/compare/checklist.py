"""What must agree before numbers of two studies may be set side by side: row by row, with the values seen.

A row is equal, harmless (it differs, and the reason says why that changes no more than rounding), fatal (the studies
answer different questions), or not recorded. The rows themselves are data: study.compare.checklist_rows.
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
    """A row. values: one for each study, in their order. blocks: whether it forbids the absolute comparison."""

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
    return _check("study", what, HARMLESS, values, "only what all of them have is set side by side")


def _gather(row: Rule, study: LoadedStudy) -> dict[str, set[str]]:
    """key -> the values that the study's runs have; runs without one under the key "" as not recorded."""
    found: dict[str, set[str]] = {}
    for member in study.members:
        for key, value in (row.read(member) or {"": NOT_RECORDED}).items():
            found.setdefault(key, set()).add(value)
    return found


def _row(row: Rule, studies: Sequence[LoadedStudy]) -> Check | None:
    """Compare the keys that all studies have, if any; a study that disagrees within itself is not equal to any."""
    found = [_gather(row, study) for study in studies]
    unknown = any(NOT_RECORDED in values for seen in found for values in seen.values())
    if row.recent and not any(row.read(member) for study in studies for member in study.members):
        return None
    shared = [key for key in found[0] if all(key in seen for seen in found)]
    differing = [key for key in shared if len(set.union(*(seen[key] for seen in found)) - {NOT_RECORDED}) > 1]
    values = [_shown(seen, differing or list(seen)) for seen in found]
    if differing:
        return _check(row.group, row.subject, row.severity, values, row.reason)
    if unknown:
        return _unknown(row, values)
    if not shared:
        return None  # no seed or variant in common, which has a row of its own
    return _check(row.group, row.subject, EQUAL, values, "")


def _unknown(row: Rule, values: list[str]) -> Check:
    """A row that nobody can judge; it blocks where a difference would be fatal, except that of older records."""
    older = row.subject == "float32 products"
    blocks = row.severity == FATAL and not older
    told = "it cannot be shown to agree" if blocks else row.unknown
    return Check(row.group, row.subject, NOT_RECORDED, tuple(values), told, blocks)


def _shown(found: dict[str, set[str]], keys: Sequence[str]) -> str:
    texts = {key: " and ".join(sorted(found[key])) for key in keys if key in found}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{key} {text}".strip() for key, text in sorted(texts.items())) or "-"


def _settings(studies: Sequence[LoadedStudy]) -> list[Check]:
    """A row for each symbol of the saved settings that no other row compares in effect."""
    configs = [[member.config for member in study.members] for study in studies]
    if not all(config is not None for own in configs for config in own):
        return _without_settings(studies)
    names = sorted(
        {name for own in configs for config in own for name in config or {} if name not in COVERED}
    )
    checks = []
    for name in names:
        seen = [{_value(config or {}, name) for config in own} for own in configs]
        values = [" and ".join(sorted(own)) for own in seen]
        severity, reason = _meaning(name, studies)
        equal = len(set.union(*seen)) <= 1
        checks.append(
            _check("hyper-parameters", name, EQUAL if equal else severity, values, "" if equal else reason)
        )
    explained = any(check.status != EQUAL and check.subject in HASHED for check in checks)
    if not explained:
        checks.append(
            _schedule_hash(
                studies,
                "it differs although the saved settings that it is made of agree: the runs were extended, or other "
                "settings ran",
            )
        )
    return checks


def _without_settings(studies: Sequence[LoadedStudy]) -> list[Check]:
    checks = [_schedule_hash(studies, "it cannot be said in what: saved settings are missing or unreadable")]
    if all(LEARNED in study.variants for study in studies):
        values = [_shown({"": {"on record" if member.config else NOT_RECORDED for member in study.members}}, [""])
                  for study in studies]  # fmt: skip
        told = f"the settings of {LEARNED} cannot be shown to agree"
        checks.append(
            Check("hyper-parameters", LEARNED_PREFIX + "...", NOT_RECORDED, tuple(values), told, True)
        )
    return checks


def _value(config: dict[str, str], name: str) -> str:
    """A symbol that is not written is one that is off, or out of sight since what it belongs to is off."""
    value = config.get(name, NOT_SET)
    return NOT_SET if value == "n" else value or '""'


def _meaning(name: str, studies: Sequence[LoadedStudy]) -> tuple[str, str]:
    if name in WITHOUT_EFFECT:
        return HARMLESS, WITHOUT_EFFECT[name]
    if name.startswith(LEARNED_PREFIX):
        if all(LEARNED in study.variants for study in studies):
            return FATAL, f"{LEARNED} is another variant"
        return HARMLESS, f"it concerns {LEARNED} alone, which is not in all of them"
    return FATAL, "a setting of training differs"


def _schedule_hash(studies: Sequence[LoadedStudy], reason: str) -> Check:
    row = Rule("hyper-parameters", "optimizer and budget, as hashed", fingerprint("schedule"), FATAL, reason)
    check = _row(row, studies)
    assert check is not None  # every run has this one
    return check


def _variables(studies: Sequence[LoadedStudy]) -> list[Check]:
    """A row for each environment variable that is set anywhere."""
    subject = "environment variables"
    recorded: list[list[dict[str, Any]]] = [
        [member.record.get("environment") or {} for member in study.members] for study in studies
    ]
    if not all(seen for own in recorded for seen in own):
        values = [NOT_RECORDED if not all(own) else "on record" for own in recorded]
        told = "older records do not keep those that change numbers, so none can be ruled out"
        return [Check("environment", subject, NOT_RECORDED, tuple(values), told, False)]
    names = sorted({name for own in recorded for seen in own for name in seen["variables"]})
    checks = []
    for name in names:
        seen = [{str(entry["variables"].get(name, NOT_SET)) for entry in own} for own in recorded]
        values = [" and ".join(sorted(own)) for own in seen]
        changes = VARIABLES.get(name, FORMAT)
        if len(set.union(*seen)) <= 1:
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
    if not all(_hashes(member) for own in members for member in own):
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
            for member in own
            for name, digest in _hashes(member).items()
            if name.startswith(packages)
        }
        for own in members
    ]
    seen: list[set[tuple[str, str]]] = [
        {
            item
            for member in own
            for item in changed_code(_hashes(member)).items()
            if item[0].startswith(packages)
        }
        for own in members
    ]
    common = seen[0].intersection(*seen[1:])
    differing = sorted({name for own in seen for name, _ in own - common})
    if not differing:
        return _check("code", subject, EQUAL, [f"{len(own)} modules" for own in loaded], "")
    values = [
        ", ".join(f"{name} {digest[:6]}" for name, digest in sorted(own) if name in differing) or "-"
        for own in seen
    ]
    return _check("code", subject, severity, values, f"{', '.join(differing)}: {reason}")


def _hashes(member: Member) -> dict[str, str]:
    code = (member.record.get("environment") or {}).get("code") or {}
    return {name: str(digest) for name, digest in code.items()}


def _mark(member: Member) -> str:
    """The commit, and whether more than it was run."""
    commit = (member.record["commit"] or NOT_RECORDED)[:12]
    return f"{commit} and changes" if member.record["dirty"] else commit


def _by_commit(members: list[list[Member]]) -> Check:
    subject = "code that computes"
    marks = [{_mark(member) for member in own} for own in members]
    values = [" and ".join(sorted(own)) or "-" for own in marks]
    known = all(
        member.record["commit"] and member.record["dirty"] is False for own in members for member in own
    )
    if known and len(set.union(*marks)) == 1:
        return _check("code", subject, EQUAL, values, "")
    told = "it differs or is not known, and no hashes of it are on record"
    return Check("code", subject, NOT_RECORDED, tuple(values), told, True)
