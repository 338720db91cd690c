"""Examine the variants of a study before it times or trains anything. Results are saved by the hash of the sources."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ra import arms
from ra.admission.process import examine_variants
from ra.admission.results import CHECKS, FAILED, Cost, Costs, Examination, Outcome, Violation
from ra.arms import parse_arm
from referee.pages.document import (
    Block,
    BulletList,
    Document,
    Paragraph,
    Section,
    Table,
)
from referee.pages.markup import Code, Strong, Text
from runtime import records
from runtime.errors import UserError, gib
from runtime.files import DamagedFileError
from runtime.settings import Config

ROOT = Path(__file__).parents[1]


def examine_cached(variants: Sequence[str], config: Config, autocast: bool) -> dict[str, Examination]:
    """Examine the variants that have no saved result for these sources, this torch and this shape.

    Arms that differ in the optimizer alone share an examination.
    """
    models = {name: parse_arm(name).model_name for name in variants}
    paths = {model: _saved(model, config, autocast) for model in models.values()}
    found: dict[str, Examination] = {}
    for model, path in paths.items():
        with contextlib.suppress(FileNotFoundError, DamagedFileError):
            found[model] = records.read(Examination, path)
    new = [model for model in paths if model not in found]
    if new:
        began = time.monotonic()
        print(f"examining {', '.join(new)}: causality, batches, modes, gradients and more", flush=True)
        examined = examine_variants(new, config.model, config.alternation, autocast)
        print(f"examined in {time.monotonic() - began:.0f} s; `make admit VARIANT=NAME` shows every check")
        for model, result in examined.items():
            paths[model].parent.mkdir(parents=True, exist_ok=True)
            if result.complete:  # a crash or a time limit may have another cause than the source
                records.write(paths[model], result)
        found |= examined
    return {name: _renamed(found[model], name) for name, model in models.items()}


def _renamed(examination: Examination, name: str) -> Examination:
    violations = tuple(one.replace(variant=name) for one in examination.violations)
    return examination.replace(variant=name, violations=violations)


def _saved(name: str, config: Config, autocast: bool) -> Path:
    """The file of a variant's result: its name is the hash of everything that the result depends on."""
    digest = hashlib.sha256()
    sources = [path for folder in ("gpt2", "ra") for path in ROOT.glob(f"{folder}/**/*.py")]
    custom = any(map(arms.is_custom, parse_arm(name).file_variants))
    for path in sorted({*sources, *arms.CUSTOM_FOLDER.glob("*.py")}):
        if path.parent != arms.CUSTOM_FOLDER or custom:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    settings = [dataclasses.asdict(config.model), dataclasses.asdict(config.alternation), name, autocast]
    machine = [importlib.metadata.version("torch"), platform.python_version(), platform.machine()]
    digest.update(json.dumps([settings, machine]).encode())
    return config.data.directory / f".admission-{digest.hexdigest()[:16]}.json"


def require_admitted(examinations: Mapping[str, Examination]) -> None:
    """Raise UserError for a failed check: its first violation, with the fix and the number of the others."""
    refused = [violation for examination in examinations.values() for violation in examination.violations]
    if not refused:
        return
    first = refused[0]
    others = len({(one.variant, one.check) for one in refused} - {(first.variant, first.check)})
    more = f"; {others} more failed checks: make admit VARIANT={first.variant}" if others else ""
    raise UserError(f"{first}{more}")


def admission_document(found: Examination, study: str) -> Document:
    """The results of one variant, for the terminal. study: the shape of the examination in words."""
    failed = list(dict.fromkeys(violation.check for violation in found.violations))
    verdict: Text = (Strong("Admitted"), f": {found.variant} passes all {len(CHECKS)} checks.")
    if failed:
        verdict = (Strong("Refused"), f": {found.variant} fails {', '.join(failed)}. It is not trained.")
    elif not found.complete:
        verdict = (Strong("Refused"), f": the examination of {found.variant} did not end.")
    columns: dict[str, Callable[[Outcome], Text]] = {
        "check": lambda outcome: outcome.check,
        "result": lambda outcome: Strong(outcome.result) if outcome.result == FAILED else outcome.result,
        "seconds": lambda outcome: f"{outcome.seconds:.2f}",
    }
    blocks: list[Block] = [
        Paragraph(verdict),
        Section("Violations", [BulletList([_sentence(violation) for violation in found.violations])]),
        Section("Checks", [Table.of(found.outcomes, columns, (1,))]),
        Section("Cost", [_costs(found.variant, found.costs)] if found.costs else []),
    ]
    return Document(f"Examination of {found.variant}", blocks, subtitle=study)


def _sentence(violation: Violation) -> Text:
    layer = "" if violation.layer is None else f"layer {violation.layer}: "
    name, fact, fix = Strong(violation.check), f": {layer}{violation.message}", f"fix: {violation.fix}"
    return (
        (name, f"{fact} (", Code(violation.where), f"); {fix}")
        if violation.where
        else (name, f"{fact}; {fix}")
    )


def _costs(name: str, costs: Costs) -> Table:
    """The variant's cost beside the baseline's, and the widths of the variant that cost the same."""
    ours, base = costs.variant, costs.baseline
    rows: dict[str, Callable[[Cost], float | None]] = {
        "parameters": lambda cost: cost.parameters,
        "FLOPs per training token": lambda cost: cost.flops_per_token,
        "fused attention calls per layer": lambda cost: cost.attention_calls,
    }
    cells = [
        [what, _number(value(ours)), _number(value(base)), _ratio(value(ours), value(base))]
        for what, value in rows.items()
    ]
    memory = [gib(cost.memory_bytes) if cost.memory_bytes is not None else "unknown" for cost in (ours, base)]
    cells.append(
        ["predicted memory, one sequence, float32", *memory, _ratio(ours.memory_bytes, base.memory_bytes)]
    )
    for what, width in (
        ("width with the baseline's parameters", costs.width_equal_parameters),
        ("width with the baseline's FLOPs", costs.width_equal_flops),
    ):
        cells.append([what, _number(width), "", ""])
    return Table(["", name, "B", "ratio"], cells)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.4g}" if value >= 1e9 else f"{value:,.0f}"


def _ratio(ours: float | None, base: float | None) -> str:
    return f"{ours / base:.3f}" if ours is not None and base else "-"
