"""Check that two studies are comparable, row by row, with the recorded values.

The rows are data: study.compare.checklist_rows. Grades are those of referee.numerics.setup.checklist_rows, which any
training script uses (`python -m referee check-config`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ra.names import LEARNED
from referee.numerics.setup.checklist_rows import (
    EQUAL,
    FATAL,
    HARMLESS,
    NOT_RECORDED,
    NOT_SET,
    ChecklistRow,
    compare_tables,
    compare_values,
)
from runtime.provenance import FORMAT, SATURATION, VARIABLES
from runtime.run_record import Environment
from study.compare import checklist_rows
from study.compare.checklist_rows import EntryRule
from study.records.runs import Run


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
    order = list(dict.fromkeys(check.group for check in checks))
    return sorted(checks, key=lambda check: order.index(check.group))


def _common(kind: str, sets: Sequence[set[Any]]) -> ChecklistRow:
    """Compare the variants or the seeds of the studies."""
    texts = [{", ".join(map(str, sorted(names))) or "none"} for names in sets]
    if set.intersection(*sets):
        return compare_values("study", kind, texts, HARMLESS, "only the common ones are compared")
    return compare_values("study", kind, texts, FATAL, f"the studies share no {kind.rstrip('s')}")


def _apply(rule: EntryRule, studies: Sequence[Recorded]) -> ChecklistRow | None:
    """Compare the keys (seeds or variants) that all studies have. A study with several values is equal to no other."""
    found: list[dict[str, set[str]]] = []  # of each study: key -> values
    for study in studies:
        table: dict[str, set[str]] = {}
        for run in study.used:
            value = rule.read(run.record)
            key = {"seed": f"seed {run.seed}", "variant": run.variant}.get(rule.by, "")
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
    rule = EntryRule(
        group, "optimizer and budget (hash)", lambda record: record.fingerprint.schedule[:12], FATAL, reason
    )
    return [*checks, *filter(None, [_apply(rule, studies)])]


def _values(config: Mapping[str, str]) -> dict[str, str]:
    """Return symbol -> value. An absent symbol is off, or hidden because its parent is off."""
    return {
        name: NOT_SET if value == "n" else value or '""'
        for name, value in config.items()
        if name not in checklist_rows.COVERED
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
    tables = [
        [{name: str(value) for name, value in run.record.environment.variables.items()} for run in study.used]
        for study in studies
    ]
    checks = compare_tables(group, tables, _variable_meaning)
    return checks or [compare_values(group, subject, [{"none set"} for _ in studies], EQUAL, "")]


def _variable_meaning(name: str) -> tuple[str, str]:
    changes = VARIABLES.get(name, FORMAT)
    return FATAL if changes in (FORMAT, SATURATION) else HARMLESS, f"it changes {changes}"


def _code(studies: Sequence[Recorded]) -> list[ChecklistRow]:
    """Compare the sources of each variant that a user wrote. Other ones are excluded alone, if variants remain."""
    shared = sorted(set.intersection(*(set(study.variants) for study in studies)))
    checks = {name: check for name in shared if (check := _source(name, studies))}
    remain = any(name not in checks or checks[name].status == EQUAL for name in shared)
    return [
        dataclasses.replace(check, blocks=False, excludes=name) if check.blocks and remain else check
        for name, check in checks.items()
    ]


def _source(name: str, studies: Sequence[Recorded]) -> ChecklistRow | None:
    """Compare the modules of ra.custom that the runs of a variant had loaded; None where they had none."""
    sources = [
        {_modules(run.record.environment) for run in study.used if run.variant == name} for study in studies
    ]
    if set.union(*sources) == {""}:
        return None
    return compare_values(
        "code", f"source of {name}", sources, FATAL, "the variant may compute something else"
    )


def _modules(environment: Environment) -> str:
    return ", ".join(f"{module} {str(digest)[:6]}" for module, digest in environment.code.items())
