"""The time that runs trained for, beside the time that they were given. Reads records only; needs no torch.

Counts come from steps that were timed before the first run. On a machine that was busy with something else then,
they are too small, and too small by different shares for different kinds of variant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ra.names import is_equivalent
from study.runs import Run
from study.statistics import mean

EARLY = 0.75  # of its time: a variant that trained for less of it was planned on a slower machine


def time_limit(budget: Mapping[str, Any]) -> float | None:
    """Seconds of training that each run was given, where time is its only limit."""
    others = ("equal_tokens", "max_tokens", "max_iterations")
    seconds: float | None = budget.get("max_time_seconds") or None
    return None if any(budget.get(key) for key in others) else seconds


def early(budget: Mapping[str, Any], used: Sequence[Run]) -> list[str]:
    """The variants whose runs trained for much less than the time that they were given, on average."""
    limit = time_limit(budget)
    seconds: dict[str, list[float]] = {}
    for run in used:
        spent = run.record["progress"]["train_seconds"]
        seconds.setdefault(run.variant, []).extend([] if spent is None else [spent])
    return [name for name, own in seconds.items() if limit and own and mean(own) < EARLY * limit]


def misplanned(budget: Mapping[str, Any], used: Sequence[Run]) -> list[str]:
    """The real changes whose end can be held against no equivalent arm: neither equal time nor equal tokens.

    They ended at other tokens than the arms did, by counts that were timed on a busy machine.
    """
    arms = {run.record["progress"]["tokens"] for run in used if is_equivalent(run.variant)}
    if not early(budget, used):
        return []
    return list(
        dict.fromkeys(
            run.variant
            for run in used
            if not is_equivalent(run.variant) and arms != {run.record["progress"]["tokens"]}
        )
    )
