"""What a difference of losses may owe to unequal training. It is allowed for before anything is said of the difference.

At the end of a time limit a variant may have trained for less or more seconds than the arms, since counts come from
steps that were timed on a machine whose speed wanders. At equal tokens a run of fewer steps is further on in its
schedule, at another learning rate. Reads records only; needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ra.names import is_control_arm
from study.analysis.timing import EARLY
from study.records.runs import Run, losses
from study.stats.statistics import mean

EQUAL = 0.995  # of one another's time, where nothing is known of what the rest is worth
SAFETY = 2.0  # times what the loss's own slope says that more training would have gained
SETTLED = 0.9  # of a run's tokens: evaluations behind it are too close to the end to show a slope

# why nobody knows
TIMES = "times too far apart"
CARDS = "different cards"
SLOPES = "no slope"
SCHEDULES = "schedules of different lengths"


@dataclass(frozen=True)
class Allowance:
    """What a difference (nats, a variant's loss minus the arms') would change by, as far as can be told, with equal
    training.

    None where nobody knows; why: the reason. own, arms: the training that they had, in seconds or, at equal tokens,
    the lengths of their schedules in tokens.
    """

    move: float | None = 0.0
    own: float = 0.0
    arms: float = 0.0
    in_seconds: bool = False
    why: str = ""


NO_ALLOWANCE = Allowance()
Allowances = Mapping[str, Allowance]  # by variant; NO_ALLOWANCE of one that is not in it


def by_time(ended: Sequence[Run]) -> Allowances:
    """Of each real change at the end of a budget. ended: the used runs that ended their schedule."""
    return {name: of_time(own, arms) for name, own, arms in _changes(ended)}


def by_schedule(used: Sequence[Run]) -> Allowances:
    """Of each real change at equal tokens: none with schedules of one length, else unknown.

    A run that is further on in its schedule may have had lower learning rates. That puts it ahead late in a long
    training and behind in a short one, and nothing in the records tells by how much.
    """
    found: dict[str, Allowance] = {}
    for name, own, arms in _changes(used):
        pairs = _matched(own, arms)
        if any(_scheduled(run) != _scheduled(arm) for run, at_seed in pairs for arm in at_seed):
            lengths = mean([_scheduled(run) for run, _ in pairs])
            theirs = mean([_scheduled(arm) for _, at_seed in pairs for arm in at_seed])
            found[name] = Allowance(None, lengths, theirs, why=SCHEDULES)
    return found


def of_time(own: Sequence[Run], others: Sequence[Run]) -> Allowance:
    """Of the difference of two groups of runs at the seeds that both have; none where they ended at equal tokens.

    Those that trained for less time would have gained by more of it at the pace of the last part of what they had.
    Unknown under EARLY of the time, between cards, and where the pace of one of them is not known, but for EQUAL times.
    """
    pairs = _matched(own, others)
    if all(_end(run) == _end(other) for run, at_seed in pairs for other in at_seed):
        return NO_ALLOWANCE
    spent = [_seconds(run) for run, _ in pairs]
    theirs = [mean([_seconds(other) for other in at_seed]) for _, at_seed in pairs]
    unknown = Allowance(None, mean(spent), mean(theirs), in_seconds=True)
    cards = {run.record["target"]["device"] for first, at_seed in pairs for run in (first, *at_seed)}
    if len(cards) > 1:
        return replace(unknown, why=CARDS)
    if min([*spent, *theirs]) <= 0:
        return replace(unknown, why=TIMES)
    log = mean([math.log(a / b) for a, b in zip(spent, theirs, strict=True)])
    if abs(log) > -math.log(EARLY):
        return replace(unknown, why=TIMES)
    shorter = [run for run, at_seed in pairs for run in ([run] if log < 0 else at_seed)]
    slopes = [slope for run in shorter if (slope := _slope(run)) is not None]
    if len(slopes) == len(shorter):
        return replace(unknown, move=log * mean(slopes))
    return replace(unknown, move=0.0) if abs(log) <= -math.log(EQUAL) else replace(unknown, why=SLOPES)


def _slope(run: Run) -> float | None:
    """Nats that the loss fell by for each unit of the logarithm of tokens: the most, from any evaluation in the second
    half to the end, times SAFETY.

    Losses fall ever more slowly in the logarithm, but they also fall with the learning rate: measured, further training
    gained a third to a half of it (docs/results/2026-11-22-cpu-unequal-time.md). None without an evaluation by half of
    the tokens, and where the loss rose again: it may go on rising ever faster.
    """
    end, final = _end(run), run.record["validation"]["loss"]
    curve = {tokens: loss for tokens, loss in losses(run.record).items() if 0 < tokens < end} | {end: final}
    start = end / 2
    before = max((tokens for tokens in curve if tokens <= start), default=0)
    if not before:
        return None
    after = min(tokens for tokens in curve if tokens > start)
    share = math.log(start / before) / math.log(after / before)
    points = {start: curve[before] + share * (curve[after] - curve[before])}
    points |= {tokens: loss for tokens, loss in curve.items() if start < tokens <= SETTLED * end}
    slopes = [(loss - final) / math.log(end / tokens) for tokens, loss in points.items()]
    return SAFETY * max(slopes) if min(slopes) >= 0 else None


def _changes(runs: Sequence[Run]) -> list[tuple[str, list[Run], list[Run]]]:
    """Every real change with its runs and those of the equivalent arms."""
    arms = [run for run in runs if is_control_arm(run.variant)]
    names = dict.fromkeys(run.variant for run in runs if not is_control_arm(run.variant))
    return [(name, [run for run in runs if run.variant == name], arms) for name in names]


def _matched(own: Sequence[Run], others: Sequence[Run]) -> list[tuple[Run, list[Run]]]:
    """Each run with the others of its seed, where there are any."""
    pairs = [(run, [other for other in others if other.seed == run.seed]) for run in own]
    return [(run, at_seed) for run, at_seed in pairs if at_seed]


def _end(run: Run) -> int:
    """Tokens at which the run ended."""
    tokens: int = run.record["progress"]["tokens"]
    return tokens


def _seconds(run: Run) -> float:
    seconds: float = run.record["progress"]["train_seconds"]
    return seconds


def _scheduled(run: Run) -> float:
    """Tokens of the run's whole schedule, which a run that was cut did not end."""
    progress, schedule = run.record["progress"], run.record.get("schedule") or {}
    made: int = progress["iterations"]
    return progress["tokens"] * schedule.get("iterations", made) / made if made else 0.0
