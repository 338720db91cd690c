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
from study.compare import checklist_rows
from study.compare.checklist_rows import EQUAL, FATAL, HARMLESS, NOT_RECORDED, NOT_SET, Rule
from study.compare.load import LoadedStudy
from study.records.runs import Run

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
    checks = [_common("variants", [set(study.report.variants) for study in studies])]
    checks.append(_common("seeds", [study.seeds for study in studies]))
    checks += [check for rule in checklist_rows.RULES if (check := _apply(rule, studies))]
    checks += [*_settings(studies), *_variables(studies), *_code(studies)]
    order = list(dict.fromkeys(check.group for check in checks))
    return sorted(checks, key=lambda check: order.index(check.group))


def _compare(group: str, subject: str, found: Sequence[set[str]], severity: str, reason: str) -> Check:
    """Compare one entry. found: the values in each study."""
    values = tuple(" and ".join(sorted(values)) or "-" for values in found)
    if len(set.union(*found)) <= 1:
        return Check(group, subject, EQUAL, values, "", False)
    return Check(group, subject, severity, values, reason, severity == FATAL)


def _common(kind: str, sets: Sequence[set[Any]]) -> Check:
    """Compare the variants or the seeds of the studies."""
    texts = [{", ".join(map(str, sorted(names))) or "none"} for names in sets]
    if set.intersection(*sets):
        return _compare("study", kind, texts, HARMLESS, "only the common ones are compared")
    return _compare("study", kind, texts, FATAL, f"the studies share no {kind.rstrip('s')}")


def _apply(rule: Rule, studies: Sequence[LoadedStudy]) -> Check | None:
    """Compare the keys that all studies have. A study with several values is equal to no other."""
    found: list[dict[str, set[str]]] = []  # of each study: seed, variant or "" -> values
    for study in studies:
        table: dict[str, set[str]] = {}
        for run in study.report.used:
            value = rule.read(run.record)
            key = {"": "", "seed": f"seed {run.seed}", "variant": run.variant}[rule.by]
            table.setdefault(key, set()).add(NOT_RECORDED if value is None else str(value))
        found.append(table)
    every = set().union(*(values for table in found for values in table.values()))
    shared = set.intersection(*(set(table) for table in found))
    differing = {
        key for key in shared if len(set.union(*(table[key] for table in found)) - {NOT_RECORDED}) > 1
    }
    values = tuple(_shown(table, differing or set(table)) for table in found)
    if rule.recent and every == {NOT_RECORDED}:
        return None
    if differing:
        return Check(rule.group, rule.subject, rule.severity, values, rule.reason, rule.severity == FATAL)
    if NOT_RECORDED in every:
        # Older records lack the setting of float32 products.
        blocks = rule.severity == FATAL and rule.subject != "float32 products"
        reason = "agreement cannot be shown" if blocks else rule.unknown
        return Check(rule.group, rule.subject, NOT_RECORDED, values, reason, blocks)
    # Without a common seed or variant, that check reports it.
    return Check(rule.group, rule.subject, EQUAL, values, "", False) if shared else None


def _shown(table: dict[str, set[str]], keys: set[str]) -> str:
    texts = {key: " and ".join(sorted(table[key])) for key in sorted(keys & table.keys())}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{key} {text}".strip() for key, text in texts.items()) or "-"


def _settings(studies: Sequence[LoadedStudy]) -> list[Check]:
    """Compare each symbol of the saved settings that no rule covers, and the hash of the schedule."""
    group, checks = "hyper-parameters", []
    learned = all(LEARNED in study.report.variants for study in studies)
    configs = [list(study.configs.values()) for study in studies]
    if all(config is not None for study in configs for config in study):
        names = {name for study in configs for config in study for name in config or {}} - set(
            checklist_rows.COVERED
        )
        for name in sorted(names):
            found = [{_value(config or {}, name) for config in study} for study in configs]
            checks.append(_compare(group, name, found, *_meaning(name, learned)))
        if any(check.status != EQUAL and check.subject in checklist_rows.HASHED for check in checks):
            return checks  # they explain the hash
        reason = (
            "it differs although its saved settings agree: the runs were extended, or ran with other settings"
        )
    else:
        reason = "the differing setting is unknown: saved settings are missing or unreadable"
        if learned:
            values = tuple("recorded" if all(study) else NOT_RECORDED for study in configs)
            unknown = f"agreement of the settings of {LEARNED} cannot be shown"
            checks.append(
                Check(group, f"{checklist_rows.LEARNED_PREFIX}*", NOT_RECORDED, values, unknown, True)
            )
    rule = Rule(
        group, "optimizer and budget (hash)", lambda record: record.fingerprint.schedule[:12], FATAL, reason
    )
    return [*checks, *filter(None, [_apply(rule, studies)])]


def _value(config: dict[str, str], name: str) -> str:
    """Return the value of a symbol. An absent symbol is off, or hidden because its parent is off."""
    value = config.get(name, NOT_SET)
    return NOT_SET if value == "n" else value or '""'


def _meaning(name: str, learned: bool) -> tuple[str, str]:
    """Return the severity of a differing symbol and the reason. learned: whether all studies have LEARNED."""
    if name in checklist_rows.WITHOUT_EFFECT:
        return HARMLESS, checklist_rows.WITHOUT_EFFECT[name]
    if name.startswith(checklist_rows.LEARNED_PREFIX):
        if learned:
            return FATAL, f"{LEARNED} differs between the studies"
        return HARMLESS, f"it affects {LEARNED} alone, which not all studies have"
    return FATAL, "a setting of training differs"


def _variables(studies: Sequence[LoadedStudy]) -> list[Check]:
    """Compare each environment variable that any run has."""
    group, subject = "environment", "environment variables"
    recorded = [[run.record.environment for run in study.report.used] for study in studies]
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

    def runs(variants: set[str]) -> list[list[Run]]:
        return [[run for run in study.report.used if run.variant in variants] for study in studies]

    shared = set.intersection(*(set(study.report.variants) for study in studies))
    if not all(_digests(run) for study in runs(shared) for run in study):
        return [_commits(runs(shared))]
    reason = "the runs may compute something else"
    alone = {name: _modules(runs({name}), f"code of {name}", COMPUTING, FATAL, reason) for name in shared}
    equal = {name for name, check in alone.items() if check.status == EQUAL}
    differing = sorted(shared - equal) if equal else []
    return [
        *(dataclasses.replace(alone[name], blocks=False, excludes=name) for name in differing),
        _modules(runs(equal or shared), "code that computes", COMPUTING, FATAL, reason),
        _modules(
            runs(shared), "code that plans and reports", PLANNING, HARMLESS, "its decisions are recorded"
        ),
    ]


def _digests(run: Run) -> dict[str, str]:
    environment = run.record.environment
    return {name: str(digest) for name, digest in environment.code.items()} if environment else {}


def _changes(run: Run) -> dict[str, str]:
    """Return the modules of a run that compute other numbers than the present ones."""
    return changed_code(_digests(run), checklist_rows.NUMBER_CHANGES.get(run.variant, {}))


def _modules(
    studies: list[list[Run]], subject: str, packages: tuple[str, ...], severity: str, reason: str
) -> Check:
    """Compare the modules of some packages. A module that only some of the studies loaded counts as different."""
    changed = [
        {
            f"{name} {digest[:6]}"
            for run in study
            for name, digest in _changes(run).items()
            if name.startswith(packages)
        }
        for study in studies
    ]
    common = set.intersection(*changed)
    own = [sorted(study - common) for study in changed]
    if differing := sorted({line.split()[0] for study in own for line in study}):
        values = tuple(map(_listed, own))
        return Check("code", subject, severity, values, f"{_listed(differing)}: {reason}", severity == FATAL)
    loaded = [
        {name for run in study for name in _digests(run) if name.startswith(packages)} for study in studies
    ]
    return Check("code", subject, EQUAL, tuple(f"{len(names)} modules" for names in loaded), "", False)


def _listed(names: list[str]) -> str:
    """Join names; of many, the first ones and the number of the others."""
    more = [f"and {len(names) - LISTED} more"] if len(names) > LISTED else []
    return ", ".join([*names[:LISTED], *more]) or "-"


def _commits(studies: list[list[Run]]) -> Check:
    """Compare commits. Code without digests is equal only if one clean commit made all runs."""
    records = [[run.record for run in study] for study in studies]
    marks = [
        {
            f"{(record.commit or NOT_RECORDED)[:12]}{' and changes' if record.dirty else ''}"
            for record in study
        }
        for study in records
    ]
    check = _compare("code", "code that computes", marks, NOT_RECORDED, "")
    clean = all(record.commit and record.dirty is False for study in records for record in study)
    if clean and check.status == EQUAL:
        return check
    reason = "it differs or is unknown, and the records have no digests of it"
    return Check(check.group, check.subject, NOT_RECORDED, check.values, reason, True)
