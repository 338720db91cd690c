"""The time that runs trained for, beside the time that they were given. Reads records only; needs no torch.

Counts come from steps that were timed before the first run. On a machine whose speed wanders, or that was busy with
something else then, they are wrong, and by different shares for different kinds of variant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from study.records.runs import Run
from study.stats.statistics import mean

EARLY = 0.75  # of a time: a run that trained for less of it was planned on another machine
MARGIN_TOLD = 0.02  # of the time limit


def time_limit(budget: Mapping[str, Any]) -> float | None:
    """Seconds of training that each run was given, where time is its only limit."""
    others = ("equal_tokens", "max_tokens", "max_iterations")
    seconds: float | None = budget.get("max_time_seconds") or None
    return None if any(budget.get(key) for key in others) else seconds


def told_margin(plan: Mapping[str, Any]) -> list[str]:
    """What is said of the time that a plan's counts leave free."""
    margin = plan.get("margin")
    if not isinstance(margin, float) or margin <= MARGIN_TOLD or not time_limit(plan.get("budget") or {}):
        return []
    return [
        f"The machine's speed changed while steps were timed: counts leave {100 * margin / (1 + margin):.0f} % of the "
        "time limit free, for slower runs to end their schedule too."
    ]


def early(budget: Mapping[str, Any], ended: Sequence[Run]) -> list[str]:
    """The variants whose runs trained for much less than the time that they were given, on average."""
    limit = time_limit(budget)
    return [name for name, own in _seconds(ended).items() if limit and own < EARLY * limit]


def _seconds(runs: Sequence[Run]) -> dict[str, float]:
    """Variant -> mean seconds of training of its runs."""
    spent: dict[str, list[float]] = {}
    for run in runs:
        spent.setdefault(run.variant, []).append(run.record["progress"]["train_seconds"])
    return {name: mean(own) for name, own in spent.items()}
