"""Check that studies are comparable, row by row, with the recorded values.

Grades are those of referee.numerics.setup.checklist_rows, which any training script uses
(`python -m referee check-config`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ra.arms import LEARNED
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
from study.compare.loaded_studies import LoadedStudy
from study.hellaswag_scores import TASKS, EndingsTask, accuracy, items_text
from study.runs import Run
from study.study_settings import declared

Read = Callable[[Run], Any]


@dataclass(frozen=True)
class EntryRule:
    """One entry of a record to compare."""

    group: str
    subject: str
    read: Read
    severity: str  # of a difference
    reason: str
    by: str = ""  # "seed" or "variant": the value may differ between these and is compared for each


def _environment(read: Callable[[Environment], Any]) -> Read:
    """An entry of the environment; "none" where it has no value."""
    return lambda run: str(read(run.record.environment) or "none")


def _digest(name: str) -> Read:
    """The first digits of a digest of the fingerprint."""
    return lambda run: getattr(run.record.fingerprint, name)[:12]


def _schedule(run: Run) -> str:
    planned = run.record.schedule
    warmup = "" if planned.warmup_iterations is None else f", {planned.warmup_iterations:,} of warm-up"
    return f"{run.record.progress.iterations:,} of {planned.iterations:,} iterations{warmup}"


def _split(run: Run) -> str:
    batch = run.record.batch
    return f"{batch.micro:,} x {batch.accumulation:,} x {batch.world_size:,}"


def _items(run: Run, task: EndingsTask) -> str:
    row = accuracy(run, task)
    return items_text(row) if row else "not scored"


VERSION = "another version may round in another way; the computed function is the same"
NUMBERS = "the row numbers shows whether the code computes the same"
RULES: tuple[EntryRule, ...] = (
    EntryRule("data", "data", _digest("data"), FATAL, "the runs trained on different text"),
    EntryRule("data", "tokenizer", _digest("tokenizer"), FATAL, "losses per token refer to different tokens"),
    EntryRule("data", "validation set", _digest("validation"), FATAL, "losses refer to different text"),
    *(EntryRule("data", f"{task.name} items", partial(_items, task=task), HARMLESS,
        f"losses do not depend on them; do not compare {task.name} accuracies")
      for task in TASKS),
    EntryRule("model", "model", _digest("model"), FATAL, "size, block size or dropout differ"),
    EntryRule("model", "parameters", lambda r: f"{r.record.parameters:,}" if r.record.parameters else NOT_RECORDED,
        FATAL,
        "the variants are different models", by="variant"),
    EntryRule("model", "initial weights", _digest("initial_weights"), FATAL,
        "one seed gives different initial weights", by="seed"),
    EntryRule("batch", "effective batch", lambda r: f"{r.record.batch.effective:,}", FATAL,
        "an optimizer step averages over a different number of sequences"),
    EntryRule("batch", "sequence length", lambda r: f"{r.record.batch.block_size:,}", FATAL,
        "the context lengths differ"),
    EntryRule("batch", "micro-batch x accumulation x processes", _split, HARMLESS,
        "the gradient is a mean over the same sequences; only rounding differs"),
    EntryRule("schedule", "schedule", _schedule, FATAL,
        "the learning rate depends on iteration / planned iterations", by="variant"),
    EntryRule("precision", "precision", lambda r: r.record.target.dtype, FATAL, "the number formats differ"),
    EntryRule("precision", "float32 products", _environment(lambda e: e.float32_matmul), FATAL,
        "TF32 keeps 10 bits of a float32's 23"),
    EntryRule("precision", "attention backend", lambda r: r.record.target.attention_backend, HARMLESS,
        "every backend computes exact softmax attention; the order of sums differs"),
    EntryRule("machine", "device", lambda r: r.record.target.device, HARMLESS, "rounding, times and memory differ"),
    EntryRule("machine", "driver", lambda r: r.record.target.driver or "none", HARMLESS, VERSION),
    EntryRule("machine", "CUDA or ROCm", _environment(lambda e: e.cuda or e.rocm), HARMLESS, VERSION),
    EntryRule("machine", "cuDNN or MIOpen", _environment(lambda e: e.cudnn), HARMLESS, VERSION),
    EntryRule("machine", "CPU threads", _environment(lambda e: e.threads), HARMLESS, "only rounding differs"),
    EntryRule("machine", "platform", _environment(lambda e: e.platform), HARMLESS, VERSION),
    EntryRule("libraries", "torch", lambda r: r.record.target.torch, HARMLESS, VERSION),
    EntryRule("libraries", "triton", _environment(lambda e: e.triton), HARMLESS, VERSION),
    EntryRule("libraries", "numpy", _environment(lambda e: e.numpy), HARMLESS,
        "it shuffles the batches: if the order changed, the losses part at the first step"),
    EntryRule("libraries", "python", _environment(lambda e: e.python), HARMLESS,
        "the text it prepares is compared under data"),
    EntryRule("code", "numbers", lambda r: r.record.fingerprint.numbers, FATAL,
        "the code computes other numbers from the same configuration"),
    EntryRule("code", "commit", lambda r: r.record.commit[:12] if r.record.commit else NOT_RECORDED, HARMLESS, NUMBERS),
    EntryRule("code", "uncommitted changes", lambda r: {None: NOT_RECORDED, True: "yes", False: "no"}[r.record.dirty],
        HARMLESS, NUMBERS),
)  # fmt: skip

# Entries of a record whose symbols are not compared: the rows above compare the record, and studies have names.
COVERED = ("model", "data", "tokenizer", "validation", "batch", "target", "design", "study", "folder")
HASHED = ("schedule", "budget", "start")  # their symbols are in the fingerprint's hash of the schedule
BUDGET = "a budget only sets the number of iterations, which the row schedule compares"
ROUNDING = "it changes speed and rounding, not the computed function"
ASIDE = "it changes no training step"
LEARNED_PREFIX = "ALTERNATION_"


def checklist(studies: Sequence[LoadedStudy]) -> list[ChecklistRow]:
    """Check every entry."""
    return [
        _common("variants", [set(study.variants) for study in studies]),
        _common("seeds", [study.seeds for study in studies]),
        *(row for rule in RULES if (row := _compared(rule, studies))),
        *_settings(studies),
        *_variables(studies),
        *_code(studies),
    ]


def _common(kind: str, sets: Sequence[set[Any]]) -> ChecklistRow:
    """Compare the variants or the seeds of the studies."""
    texts = [{", ".join(map(str, sorted(names))) or "none"} for names in sets]
    if set.intersection(*sets):
        return compare_values("study", kind, texts, HARMLESS, "only the common ones are compared")
    return compare_values("study", kind, texts, FATAL, f"the studies share no {kind.rstrip('s')}")


def _compared(rule: EntryRule, studies: Sequence[LoadedStudy]) -> ChecklistRow | None:
    """Compare an entry at the keys (seeds or variants) that all studies have; None without one.

    A study with several values at a key is equal to no other.
    """
    tables: list[dict[str, set[str]]] = []  # of each study: key -> values
    for study in studies:
        table: dict[str, set[str]] = {}
        for run in study.used:
            key = {"seed": f"seed {run.seed} ", "variant": f"{run.variant} "}.get(rule.by, "")
            table.setdefault(key, set()).add(f"{key}{rule.read(run)}")
        tables.append(table)
    shared = set.intersection(*(set(table) for table in tables))
    differing = {key for key in shared if len(set.union(*(table[key] for table in tables))) > 1}
    found = [{value for key in differing or shared for value in table[key]} for table in tables]
    if differing:
        return compare_values(rule.group, rule.subject, found, rule.severity, rule.reason)
    values = tuple(", ".join(sorted(side)) for side in found)
    return ChecklistRow(rule.group, rule.subject, EQUAL, values, "", False) if shared else None


def _settings(studies: Sequence[LoadedStudy]) -> list[ChecklistRow]:
    """Compare each symbol of the saved settings that no rule covers, and the hash of the schedule."""
    group = "hyper-parameters"
    configs = [list(study.configs.values()) for study in studies]
    if not all(all(side) for side in configs):
        values = tuple("recorded" if all(side) else NOT_RECORDED for side in configs)
        return [
            ChecklistRow(group, "saved settings", NOT_RECORDED, values, "agreement cannot be shown", True)
        ]
    learned = all(LEARNED in study.variants for study in studies)
    tables = [[_values(config or {}) for config in side] for side in configs]
    checks = compare_tables(group, tables, lambda name: meaning(name, learned))
    if any(check.status != EQUAL and declared(check.subject).entry in HASHED for check in checks):
        return checks  # they explain the hash
    reason = "it differs although its saved settings agree: the runs ran with other settings"
    rule = EntryRule(group, "optimizer and budget (hash)", _digest("schedule"), FATAL, reason)
    return [*checks, *filter(None, [_compared(rule, studies)])]


def _values(config: Mapping[str, str]) -> dict[str, str]:
    """Return symbol -> value. An absent symbol is off, or hidden because its parent is off."""
    return {
        name: NOT_SET if value == "n" else value or '""'
        for name, value in config.items()
        if declared(name).entry not in COVERED
    }


def meaning(name: str, learned: bool) -> tuple[str, str]:
    """Return the severity of a differing symbol and the reason. learned: whether all studies have LEARNED."""
    symbol = declared(name)
    if symbol.effect != "numbers":
        return HARMLESS, ROUNDING if symbol.effect == "rounding" else ASIDE
    if symbol.entry in ("budget", "plan"):
        return HARMLESS, BUDGET
    if name.startswith(LEARNED_PREFIX) and not learned:
        return HARMLESS, f"it affects {LEARNED} alone, which not all studies have"
    return FATAL, "a setting of training differs"


def _variables(studies: Sequence[LoadedStudy]) -> list[ChecklistRow]:
    """Compare each environment variable that any run has."""
    tables = [
        [{name: str(value) for name, value in run.record.environment.variables.items()} for run in study.used]
        for study in studies
    ]
    return compare_tables("environment", tables, _variable_meaning)


def _variable_meaning(name: str) -> tuple[str, str]:
    changes = VARIABLES.get(name, FORMAT)
    return FATAL if changes in (FORMAT, SATURATION) else HARMLESS, f"it changes {changes}"


def _code(studies: Sequence[LoadedStudy]) -> list[ChecklistRow]:
    """Compare the modules of ra.custom that the runs of each variant had loaded.

    A variant of another source is excluded alone, if variants remain.
    """
    shared = sorted(set.intersection(*(set(study.variants) for study in studies)))
    rows = {}
    for name in shared:
        found = [
            {_modules(run.record.environment) for run in study.used if run.variant == name}
            for study in studies
        ]
        reason = "the variant may compute something else"
        rows[name] = compare_values("code", f"source of {name}", found, FATAL, reason)
    remain = any(not row.blocks for row in rows.values())
    return [
        dataclasses.replace(row, blocks=False, excludes=name) if row.blocks and remain else row
        for name, row in rows.items()
        if row.values != ("none",) * len(studies)
    ]


def _modules(environment: Environment) -> str:
    return ", ".join(f"{module} {str(digest)[:6]}" for module, digest in environment.code.items()) or "none"
