"""The experiment in full: targets, batch, budget, fingerprints and versions of the counted runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gpt2.artifacts.run_record import Environment, FinishedRecord
from pages.document import BulletList, Details, Facts, Section
from pages.markup import Code, LineBreak, Text, pieces
from study.report.build import Report

MOST_SEEDS = 40  # with their initial weights
ENVIRONMENT = {  # keys of the record's environment and their names on the page
    "python": "Python",
    "numpy": "NumPy",
    "cuda": "CUDA",
    "rocm": "ROCm",
    "cudnn": "cuDNN or MIOpen",
    "float32_matmul": "float32 products",
    "threads": "CPU threads",
    "platform": "platform",
}
Fact = tuple[str, Text | Details]


def facts_section(report: Report) -> Section:
    """Each value once, with the number of runs where not all have it."""
    used = [run for run in report.runs if run.used]
    if not used:
        return Section("", [])
    records = [run.record for run in used]
    facts = _experiment(report, records)
    for entry in dict.fromkeys(key for record in records for key in record.fingerprint):
        if entry != "initial_weights":
            values = [record.fingerprint.get(entry) for record in records]
            facts.append((f"fingerprint: {entry}", _lines(values, Code)))
    weights = {run.seed: run.record.fingerprint.initial_weights for run in used}
    shown = [f"seed {seed}: {value}" for seed, value in list(weights.items())[:MOST_SEEDS]]
    facts.append(("fingerprint: initial weights", join_lines([Code(line) for line in shown])))
    facts += _environment([record.environment for record in records])
    filled = [fact for fact in facts if isinstance(fact[1], Details) or pieces(fact[1])]
    return Section("Experiment and fingerprint", [Facts(filled)])


def _experiment(report: Report, records: Sequence[FinishedRecord]) -> list[Fact]:
    """Target, batch, budget, commit and configuration."""
    keys = {"name": "target", "attention_backend": "attention backend"}
    facts: list[Fact] = [
        (keys.get(key, key), _lines([record.target.get(key) for record in records]))
        for key in ("name", "device", "dtype", "attention_backend", "torch", "driver")
    ]
    batches = [
        " · ".join(
            f"{key.replace('_', ' ')} {value:,}"
            for key, value in record.batch.to_json().items()
            if isinstance(value, int)
        )
        for record in records
    ]
    commits = [
        f"{record.commit}{' with uncommitted changes' if record.dirty else ''}" if record.commit else None
        for record in records
    ]
    budget = " · ".join(f"{str(key).replace('_', ' ')} {value}" for key, value in report.budget.items())
    parameters = [record.parameters and f"{record.parameters:,}" for record in records]
    return [
        *facts,
        ("batch", _lines(batches)),
        ("parameters", _lines(parameters)),
        ("budget", budget),
        ("validation tokens", f"{report.validation_tokens:,}" if report.validation_tokens else ""),
        ("commit", _lines(commits, Code)),
        ("config SHA-256", _lines([record.config_sha256 for record in records], Code)),
    ]


def _environment(runs: Sequence[Environment | None]) -> list[Fact]:
    """Versions, variables and code that numbers may depend on besides the settings."""
    facts: list[Fact] = [
        (name, _lines([run and run.get(key) for run in runs])) for key, name in ENVIRONMENT.items()
    ]
    variables = _named([run.variables if run else {} for run in runs], "=")
    none_set = "none set that changes numbers" if any(runs) else ""
    facts.append(("variables", join_lines([Code(line) for line in variables]) if variables else none_set))
    modules = _named([run.code if run else {} for run in runs], " ")
    if modules:
        listed = BulletList([Code(line) for line in modules], small=True)
        facts.append(("code, SHA-256", Details(f"{len(modules)} modules", [listed])))
    return facts


def _counted(values: Sequence[Any]) -> list[str]:
    """Each value once, with the number of runs where not all have it. None is no value."""
    count = Counter(str(value) for value in values if value is not None)
    return [
        value + (f" ({number} run{'' if number == 1 else 's'})" if number < len(values) else "")
        for value, number in count.most_common()
    ]


def _lines(values: Sequence[Any], kind: type[Code] | type[str] = str) -> Text:
    return join_lines([kind(line) for line in _counted(values)])


def join_lines(lines: Sequence[Text]) -> Text:
    """The lines below each other."""
    joined: list[Any] = []
    for number, line in enumerate(lines):
        joined += [LineBreak()] if number else []
        joined += pieces(line)
    return tuple(joined)


def _named(tables: Sequence[Mapping[str, Any]], sign: str) -> list[str]:
    """Lines of name, sign and value over the tables of all runs, by name."""
    names = sorted({name for table in tables for name in table})
    return [
        line
        for name in names
        for line in _counted([f"{name}{sign}{table[name]}" if name in table else None for table in tables])
    ]
