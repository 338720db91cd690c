"""The experiment in full: targets, batch, budget, fingerprints and versions of the counted runs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from referee.pages.document import Section, Table
from referee.pages.markup import Code, Text
from study.records.runs import SHARED
from study.report.build import Report

MOST_SEEDS = 40  # with their initial weights
TARGET = {
    "name": "target", "device": "device", "dtype": "dtype", "attention_backend": "attention backend",
    "torch": "torch", "driver": "driver",
}  # fmt: skip
ENVIRONMENT = {
    "python": "Python", "numpy": "NumPy", "cuda": "CUDA", "rocm": "ROCm", "cudnn": "cuDNN or MIOpen",
    "float32_matmul": "float32 products", "threads": "CPU threads", "platform": "platform",
}  # fmt: skip


def facts_section(report: Report) -> Section:
    """Each value once, with the number of runs where not all have it."""
    records = [run.record for run in report.used]
    if not records:
        return Section("", [])
    changes = ("", " with uncommitted changes")
    environments = [record.environment for record in records]
    facts: list[tuple[str, Iterable[Text]]] = [
        (name, _counted([getattr(record.target, key) for record in records])) for key, name in TARGET.items()
    ]
    facts += [
        ("batch", _counted([_listed(record.batch.to_json()) for record in records])),
        ("parameters", _counted([record.parameters and f"{record.parameters:,}" for record in records])),
        ("budget", [_listed(dataclasses.asdict(report.budget) if report.budget else {})]),
        ("validation tokens", [f"{records[0].validation.tokens:,}"]),
        (
            "commit",
            _code([record.commit and record.commit + changes[bool(record.dirty)] for record in records]),
        ),
        ("config SHA-256", _code([record.config_sha256 for record in records])),
    ]
    prints = [record.fingerprint.to_json() for record in records]
    facts += [(f"fingerprint: {key}", _code([values.get(key) for values in prints])) for key in SHARED]
    weights = {run.seed: run.record.fingerprint.initial_weights for run in report.used}
    shown = [Code(f"seed {seed}: {value}") for seed, value in list(weights.items())[:MOST_SEEDS]]
    facts.append(("fingerprint: initial weights", shown))
    facts += [
        (name, _counted([getattr(found, key) for found in environments])) for key, name in ENVIRONMENT.items()
    ]
    variables = _named([found.variables for found in environments], "=")
    facts.append(("variables", variables or ["none set that changes numbers"]))
    modules = _named([found.code for found in environments], " ")
    facts.append(("custom source", modules))
    rows: list[list[Text]] = []
    for name, values in facts:
        found = [value for value in values if value]
        rows += [[name if number == 0 else "", value] for number, value in enumerate(found)]
    return Section("Experiment and fingerprint", [Table(["entry", "value"], rows, (1,))])


def _listed(values: Mapping[str, Any]) -> str:
    """Names and values in a line."""
    return " · ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def _counted(values: Sequence[Any]) -> list[str]:
    """Each value once, with the number of runs where not all have it. None is no value."""
    count = Counter(str(value) for value in values if value is not None)
    return [
        value + (f" ({number} run{'' if number == 1 else 's'})" if number < len(values) else "")
        for value, number in count.most_common()
    ]


def _code(values: Sequence[Any]) -> list[Code]:
    return [Code(value) for value in _counted(values)]


def _named(tables: Sequence[Mapping[str, Any]], sign: str) -> list[Code]:
    """Lines of name, sign and value over the tables of all runs, by name."""
    return [
        line
        for name in sorted({name for table in tables for name in table})
        for line in _code([f"{name}{sign}{table[name]}" if name in table else None for table in tables])
    ]
