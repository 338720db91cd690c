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
    limit, spent = time_limit(budget), _seconds(used)
    return [name for name, own in spent.items() if limit and mean(list(own.values())) < EARLY * limit]


def misplanned(budget: Mapping[str, Any], ended: Sequence[Run]) -> dict[str, tuple[float, float]]:
    """The real changes that ended neither at equal time with the equivalent arms nor at equal tokens.

    Of each the mean seconds that it trained for, and those of the arms at the same seeds. ended: the used runs that
    ended their schedule. Times are called equal down to EARLY of one another, as a machine's speed wanders; down to
    EQUAL where either is known to have been planned on a slower machine.
    """
    limit, spent = time_limit(budget), _seconds(ended)
    found: dict[str, tuple[float, float]] = {}
    if limit is None:
        return found
    for name in (name for name in spent if not is_equivalent(name)):
        at_seeds = [run for run in ended if run.seed in spent[name] and is_equivalent(run.variant)]
        arms = _seconds(at_seeds)
        if not arms:
            continue
        own = mean([spent[name][seed] for seed in {run.seed for run in at_seeds} if seed is not None])
        theirs = mean([mean(list(seconds.values())) for seconds in arms.values()])
        hurried = own < EARLY * limit or early(budget, at_seeds)
        ends = {run.record["progress"]["tokens"] for run in at_seeds}
        same = ends == {run.record["progress"]["tokens"] for run in ended if run.variant == name}
        if not same and min(own, theirs) < (EQUAL if hurried else EARLY) * max(own, theirs):
            found[name] = own, theirs
    return found


def _seconds(runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """Variant -> seed -> seconds of training, where they are known."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        seconds = run.record["progress"]["train_seconds"]
        if seconds is not None and run.seed is not None:
            found.setdefault(run.variant, {})[run.seed] = seconds
    return found
