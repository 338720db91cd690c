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
EQUAL = 0.95  # of one another's time, for variants of which one was planned so


def time_limit(budget: Mapping[str, Any]) -> float | None:
    """Seconds of training that each run was given, where time is its only limit."""
    others = ("equal_tokens", "max_tokens", "max_iterations")
    seconds: float | None = budget.get("max_time_seconds") or None
    return None if any(budget.get(key) for key in others) else seconds


def early(budget: Mapping[str, Any], used: Sequence[Run]) -> list[str]:
    """The variants whose runs trained for much less than the time that they were given, on average."""
    limit = time_limit(budget)
    return [name for name, spent in _seconds(used).items() if limit and spent < EARLY * limit]


def misplanned(budget: Mapping[str, Any], ended: Sequence[Run]) -> list[str]:
    """The real changes that ended neither at equal time with the equivalent arms nor at equal tokens.

    ended: the used runs that ended their schedule. Times are called equal down to EARLY of one another, as a machine's
    speed wanders; down to EQUAL where either is known to have been planned on a slower machine.
    """
    seconds, tokens = _seconds(ended), _values(ended, "tokens")
    arms = [name for name in seconds if is_equivalent(name)]
    if not time_limit(budget) or not arms:
        return []
    theirs, hurried = mean([seconds[name] for name in arms]), early(budget, ended)
    found = []
    for name in (name for name in seconds if name not in arms):
        equal = EQUAL if {name, *arms} & set(hurried) else EARLY
        ratio = min(seconds[name], theirs) / max(seconds[name], theirs, 1e-9)
        if {*tokens[name]} != {end for arm in arms for end in tokens[arm]} and ratio < equal:
            found.append(name)
    return found


def _values(runs: Sequence[Run], key: str) -> dict[str, list[float]]:
    """Variant -> this entry of the progress of each of its runs that has it."""
    found: dict[str, list[float]] = {}
    for run in runs:
        value = run.record["progress"][key]
        if value is not None:
            found.setdefault(run.variant, []).append(value)
    return found


def _seconds(runs: Sequence[Run]) -> dict[str, float]:
    """Variant -> mean seconds of training."""
    return {name: mean(own) for name, own in _values(runs, "train_seconds").items()}
