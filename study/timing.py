"""The time that runs trained for, beside the time that they were given. Reads records only; needs no torch.

Counts come from steps that were timed before the first run. On a machine whose speed wanders, or that was busy with
something else then, they are wrong, and by different shares for different kinds of variant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ra.names import is_equivalent
from study.runs import Run, losses
from study.statistics import mean

EARLY = 0.75  # of a time: a run that trained for less of it was planned on another machine
MARGIN_TOLD = 0.02  # of the time limit
PARTS = 3  # of a run's tokens: over all but the first its loss shows what more training would have gained it
EQUAL = 0.98  # of one another's time, where nothing is known of what the rest is worth


@dataclass(frozen=True)
class Trained:
    """Seconds that a real change trained for, and the equivalent arms at its seeds; means over runs.

    worth: what the difference of their losses (nats, the variant's minus the arms') would change by, at most, had
    those that trained for less trained for as long as the others. None where nobody knows: of less than EARLY of the
    time, or without an evaluation early enough.
    """

    own: float
    arms: float
    worth: float | None


def time_limit(budget: Mapping[str, Any]) -> float | None:
    """Seconds of training that each run was given, where time is its only limit."""
    others = ("equal_tokens", "max_tokens", "max_iterations")
    seconds: float | None = budget.get("max_time_seconds") or None
    return None if any(budget.get(key) for key in others) else seconds


def told_margin(plan: Mapping[str, Any]) -> list[str]:
    """What is said of the time that a plan's counts leave free."""
    free = plan.get("margin") or 0.0
    if free <= MARGIN_TOLD:
        return []
    return [
        f"The machine's speed changed while steps were timed: counts leave {100 * free:.0f} % of the time limit free, "
        "for slower runs to end their schedule too."
    ]


def early(budget: Mapping[str, Any], ended: Sequence[Run]) -> list[str]:
    """The variants whose runs trained for much less than the time that they were given, on average."""
    limit = time_limit(budget)
    return [name for name, own in _seconds(ended).items() if limit and own < EARLY * limit]


def trained(budget: Mapping[str, Any], ended: Sequence[Run]) -> dict[str, Trained]:
    """The real changes that a time limit ended at other tokens than the equivalent arms at the same seeds.

    ended: the used runs that ended their schedule.
    """
    found: dict[str, Trained] = {}
    for name in dict.fromkeys(run.variant for run in ended) if time_limit(budget) else ():
        seeds = {run.seed for run in ended if run.variant == name}
        arms = [run for run in ended if run.seed in seeds and is_equivalent(run.variant)]
        own = [run for run in ended if run.variant == name and run.seed in {arm.seed for arm in arms}]
        if own and not is_equivalent(name) and _ends(own) != _ends(arms):
            found[name] = _compared(own, arms)
    return found


def _compared(own: Sequence[Run], arms: Sequence[Run]) -> Trained:
    """What the shorter of the two would have gained by more training, at the pace of the last part of what it had."""
    spent, theirs = (mean(list(_seconds(runs).values())) for runs in (own, arms))
    fewer, more = sorted((spent, theirs))
    shorter, sign = (own, -1) if spent < theirs else (arms, 1)
    slopes = [slope for run in shorter if (slope := _slope(run)) is not None]
    worth = None
    if fewer and fewer >= (EARLY if slopes else EQUAL) * more:
        worth = sign * mean(slopes) * math.log(more / fewer) if slopes else 0.0
    return Trained(spent, theirs, worth)


def _slope(run: Run) -> float | None:
    """Nats that the loss fell by over all but the first of PARTS of a run's tokens, a unit of their logarithm.

    Losses fall ever more slowly in the logarithm, so that it is more than further training would have gained; over less
    of the run it would not be, where the learning rate decays. None without an evaluation before.
    """
    end, final = run.record["progress"]["tokens"], run.record["validation"]["loss"]
    start = end / PARTS
    curve = {tokens: loss for tokens, loss in losses(run.record).items() if 0 < tokens < end} | {end: final}
    before = max((tokens for tokens in curve if tokens <= start), default=None)
    if before is None:
        return None
    after = min(tokens for tokens in curve if tokens > start)
    share = math.log(start / before) / math.log(after / before)
    loss = curve[before] + share * (curve[after] - curve[before])
    return (loss - final) / math.log(end / start)


def _ends(runs: Sequence[Run]) -> set[int]:
    """The tokens at which the runs ended."""
    return {run.record["progress"]["tokens"] for run in runs}


def _seconds(runs: Sequence[Run]) -> dict[str, float]:
    """Variant -> mean seconds of training of its runs."""
    spent: dict[str, list[float]] = {}
    for run in runs:
        spent.setdefault(run.variant, []).append(run.record["progress"]["train_seconds"])
    return {name: mean(own) for name, own in spent.items()}
