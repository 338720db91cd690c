"""Show the examination of a variant: every check, its violations and its cost. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable

from ra.admission.results import CHECKS, FAILED, Cost, Costs, Examination, Outcome, Violation
from referee.pages.document import (
    HTML,
    MARKDOWN,
    TERMINAL,
    Block,
    BulletList,
    Document,
    Only,
    Paragraph,
    Section,
    Table,
)
from referee.pages.markup import Code, Strong, Text
from runtime.errors import gib


def admission_document(found: Examination, study: str) -> Document:
    """The page of one variant. study: the shape of the examination in words."""
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
    meaning: dict[str, Callable[[Outcome], Text]] = {"meaning": lambda outcome: CHECKS.get(outcome.check, "")}
    tables = [
        Only((TERMINAL,), [Table.of(found.outcomes, columns, (1,))]),  # the meaning has no space there
        Only((HTML, MARKDOWN), [Table.of(found.outcomes, columns | meaning, (1, 3))]),
    ]
    blocks: list[Block] = [
        Paragraph(verdict),
        Section("Violations", [BulletList([_sentence(violation) for violation in found.violations])]),
        Section("Checks", tables),
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
