"""A comparison in plain lines."""

from __future__ import annotations

import math

from numerics.compare.causes.divergence import Divergence
from numerics.compare.run import Comparison, StepComparison


def stack_of(step: StepComparison, found: Divergence) -> list[str]:
    """Return the call stack of the target's call, else of the golden one's."""
    for call, record in ((found.row.pair.target, step.target), (found.row.pair.golden, step.golden)):
        for name in (call.name, call.forward_name) if call else ():
            if name in record.stacks:
                return record.stacks[name]
    return []


def summary(comparison: Comparison) -> list[str]:
    """Return the verdict, the first divergence and its reason in plain lines."""
    rows = [row for step in comparison.steps for row in step.rows]
    counts = {
        grade: sum(row.grade == grade for row in rows) for grade in dict.fromkeys(row.grade for row in rows)
    }
    lines = [
        f"verdict: {comparison.verdict_text}",
        "calls: " + ", ".join(f"{number} {grade}" for grade, number in counts.items()),
    ]
    lines += [comparison.reservation] if comparison.reservation else []
    if found := comparison.first:
        step, first = found
        where = f" in {step.place}" if step.place else ""
        lines += [f"first divergence: {first.name} ({first.direction}){where}", f"why: {first.why}"]
        lines += [f"differs: {text}" for text in first.what[:5]]
        lines += [f"error: {format_units(first.units)}"]
    else:
        earliest = comparison.first_unequal
        lines += [f"first unequal result, within rounding: {earliest}"] if earliest else []
    findings = [text for step in comparison.steps for text in step.judgement.findings]
    lines += [f"also: {text}" for text in findings[:5]]
    lines += [f"also: {len(findings) - 5} more, in compare.json"] if len(findings) > 5 else []
    return [*lines, *(f"note: {note}" for note in comparison.notes)]


def next_command(comparison: Comparison) -> str:
    """Return what to do next, or an empty text."""
    if not (found := comparison.first):
        return ""
    step, first = found
    has_values = any(cell.target and cell.target.has_values for row in step.rows for cell in row.cells)
    if first.cause in ("data", "parameter", "settings", "missing", "optimizer"):
        return "next: make both sides equal there, record both again and compare"
    if not has_values:
        listed = f'"list": ["{first.module}"]' if first.module else '"list": []'
        return f'next: record both sides with "level": "mix", "task": "tensor", {listed}, and compare these records'
    return "next: read the code at the call stack of compare.html, or replace the operation and compare"


def format_units(units: float) -> str:
    if not math.isfinite(units):
        return "without a number: a value is missing, not finite, or no real number"
    return f"{units:.3g} units of rounding"
