"""Check that two studies are comparable, row by row, with the recorded values.

The rows are data: study.compare.checklist_rows. Comparing and grading is numerics.checklist.checks, which any training
script uses (`python -m numerics check-config`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gpt2.artifacts.equivalent_code import COMPUTING, changed_code
from gpt2.artifacts.provenance import FORMAT, SATURATION, VARIABLES
from numerics.checklist.checks import (
    EQUAL,
    FATAL,
    HARMLESS,
    NOT_RECORDED,
    NOT_SET,
    ChecklistRow,
    EntryRule,
    apply_rule,
    by_group,
    compare_tables,
    compare_values,
    listed,
)
from ra.names import LEARNED
from study.compare import checklist_rows
from study.records.integrity import FinishedRecord
from study.records.runs import Run

PLANNING = ("study.", "scripts.", "configuration.", "pages.", "bench.")


class Recorded(Protocol):
    """One side of the checklist: its runs, their variants and seeds, and their settings by run and symbol."""

    @property
    def used(self) -> Sequence[Run]: ...

    @property
    def variants(self) -> Sequence[str]: ...

    @property
    def seeds(self) -> set[int]: ...

    @property
    def configs(self) -> Mapping[str, Mapping[str, str] | None]: ...


def checklist(studies: Sequence[Recorded]) -> list[ChecklistRow]:
    """Check every entry, in the order of the groups."""
    checks = [_common("variants", [set(study.variants) for study in studies])]
    checks.append(_common("seeds", [study.seeds for study in studies]))
    checks += [check for rule in checklist_rows.RULES if (check := _apply(rule, studies))]
    checks += [*_settings(studies), *_variables(studies), *_code(studies)]
    return by_group(checks)


def _common(kind: str, sets: Sequence[set[Any]]) -> ChecklistRow:
    """Compare the variants or the seeds of the studies."""
    texts = [{", ".join(map(str, sorted(names))) or "none"} for names in sets]
    if set.intersection(*sets):
        return compare_values("study", kind, texts, HARMLESS, "only the common ones are compared")
    return compare_values("study", kind, texts, FATAL, f"the studies share no {kind.rstrip('s')}")


def _apply(rule: EntryRule[FinishedRecord], studies: Sequence[Recorded]) -> ChecklistRow | None:
    """Apply a rule to the records, by seed or by variant where it asks for it."""
    return apply_rule(
        rule,
        [
            [({"seed": f"seed {run.seed}", "variant": run.variant}, run.record) for run in study.used]
            for study in studies
        ],
    )


def _settings(studies: Sequence[Recorded]) -> list[ChecklistRow]:
    """Compare each symbol of the saved settings that no rule covers, and the hash of the schedule."""
    group, checks = "hyper-parameters", []
    learned = all(LEARNED in study.variants for study in studies)
    configs = [list(study.configs.values()) for study in studies]
    if all(config is not None for study in configs for config in study):
        tables = [[_values(config or {}) for config in study] for study in configs]
        checks += compare_tables(group, tables, lambda name: _meaning(name, learned))
        if any(check.status != EQUAL and check.subject in checklist_rows.HASHED for check in checks):
            return checks  # they explain the hash
        reason = "it differs although its saved settings agree: the runs ran with other settings"
    else:
        reason = "the differing setting is unknown: saved settings are missing or unreadable"
        if learned:
            values = tuple("recorded" if all(study) else NOT_RECORDED for study in configs)
            unknown = f"agreement of the settings of {LEARNED} cannot be shown"
            checks.append(
                ChecklistRow(group, f"{checklist_rows.LEARNED_PREFIX}*", NOT_RECORDED, values, unknown, True)
            )
    rule: EntryRule[FinishedRecord] = EntryRule(
        group, "optimizer and budget (hash)", lambda record: record.fingerprint.schedule[:12], FATAL, reason
    )
    return [*checks, *filter(None, [_apply(rule, studies)])]


def _values(config: Mapping[str, str]) -> dict[str, str]:
    """Return symbol -> value. An absent symbol is off, or hidden because its parent is off."""
    return {
        name: NOT_SET if value == "n" else value or '""'
        for name, value in config.items()
        if name not in checklist_rows.COVERED and (value or name not in checklist_rows.OFF_WHEN_EMPTY)
    }


def _meaning(name: str, learned: bool) -> tuple[str, str]:
    """Return the severity of a differing symbol and the reason. learned: whether all studies have LEARNED."""
    if name in checklist_rows.WITHOUT_EFFECT:
        return HARMLESS, checklist_rows.WITHOUT_EFFECT[name]
    if name.startswith(checklist_rows.LEARNED_PREFIX):
        if learned:
            return FATAL, f"{LEARNED} differs between the studies"
        return HARMLESS, f"it affects {LEARNED} alone, which not all studies have"
    return FATAL, "a setting of training differs"


def _variables(studies: Sequence[Recorded]) -> list[ChecklistRow]:
    """Compare each environment variable that any run has."""
    group, subject = "environment", "environment variables"
    recorded = [[run.record.environment for run in study.used] for study in studies]
    if not all(entry for study in recorded for entry in study):
        values = tuple("recorded" if all(study) else NOT_RECORDED for study in recorded)
        reason = "older records lack the variables that change numbers, so a difference cannot be excluded"
        return [ChecklistRow(group, subject, NOT_RECORDED, values, reason, False)]
    tables = [
        [{name: str(value) for name, value in entry.variables.items()} for entry in study if entry]
        for study in recorded
    ]
    checks = compare_tables(group, tables, _variable_meaning)
    return checks or [compare_values(group, subject, [{"none set"} for _ in studies], EQUAL, "")]


def _variable_meaning(name: str) -> tuple[str, str]:
    changes = VARIABLES.get(name, FORMAT)
    return FATAL if changes in (FORMAT, SATURATION) else HARMLESS, f"it changes {changes}"


def _code(studies: Sequence[Recorded]) -> list[ChecklistRow]:
    """Compare the modules that the runs had loaded, by digest.

    Modules that compute the same count as equal (gpt2.artifacts.equivalent_code). Records without digests are compared
    by commit: equal if all have one commit and no uncommitted change. A variant whose code differs is excluded if the
    code of another variant is equal.
    """

    def runs(variants: set[str]) -> list[list[Run]]:
        return [[run for run in study.used if run.variant in variants] for study in studies]

    shared = set.intersection(*(set(study.variants) for study in studies))
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
) -> ChecklistRow:
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
        values = tuple(map(listed, own))
        return ChecklistRow(
            "code", subject, severity, values, f"{listed(differing)}: {reason}", severity == FATAL
        )
    loaded = [
        {name for run in study for name in _digests(run) if name.startswith(packages)} for study in studies
    ]
    return ChecklistRow("code", subject, EQUAL, tuple(f"{len(names)} modules" for names in loaded), "", False)


def _commits(studies: list[list[Run]]) -> ChecklistRow:
    """Compare commits. Code without digests is equal only if one clean commit made all runs."""
    records = [[run.record for run in study] for study in studies]
    marks = [
        {
            f"{(record.commit or NOT_RECORDED)[:12]}{' and changes' if record.dirty else ''}"
            for record in study
        }
        for study in records
    ]
    check = compare_values("code", "code that computes", marks, NOT_RECORDED, "")
    clean = all(record.commit and record.dirty is False for study in records for record in study)
    if clean and check.status == EQUAL:
        return check
    reason = "it differs or is unknown, and the records have no digests of it"
    return ChecklistRow(check.group, check.subject, NOT_RECORDED, check.values, reason, True)
