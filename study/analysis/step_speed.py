"""Speed as an axis of its own: step times beside the baseline's, and the difference at equal time. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ra.arms import parse_arm
from referee.verdict.statistics import mean
from study.analysis.verdict import VERDICT_SEEDS, Verdict
from study.plan_file import Plan
from study.runs import Run, losses

SETTLED = 0.9  # of a run's tokens: later evaluations are too close to the end to show a slope


@dataclass(frozen=True)
class Speed:
    """A variant's step time over that of the variants of class `to`, with its 95 % interval.

    at_equal_time: the lowest and highest estimate (nats) of the difference at equal time; None under VERDICT_SEEDS
    seeds, where an input is unknown, and in a study at equal time.
    """

    variant: str
    to: str
    ratio: float
    low: float | None
    high: float | None
    at_equal_time: tuple[float, float] | None


def speeds(plan: Plan | None, verdicts: Sequence[Verdict], ended: Sequence[Run]) -> list[Speed]:
    """Return the real changes and other variants whose step times the plan knows. ended: runs with a final loss."""
    if plan is None:
        return []
    by_variant = {verdict.variant: verdict for verdict in verdicts}
    slope = slopes([run for run in ended if parse_arm(run.variant).is_control])
    found = []
    for name in dict.fromkeys(run.variant for run in ended):
        row = plan.variants.get(name)
        timed = plan.step_time_ratios.get(row.cost_class) if row else None
        if row is None or timed is None or row.cost_class == timed.to:
            continue
        verdict = by_variant.get(name)
        enough = verdict is not None and verdict.seeds >= VERDICT_SEEDS and not plan.budget.equal_time
        expected = None
        if enough and verdict and slope and timed.low and timed.high:
            moves = [rate * math.log(ratio) for rate in slope for ratio in (timed.low, timed.high)]
            centre = verdict.test.difference.mean
            expected = (centre + min(moves), centre + max(moves))
        found.append(Speed(name, timed.to, timed.ratio, timed.low, timed.high, expected))
    return found


def slopes(runs: Sequence[Run]) -> tuple[float, float] | None:
    """Return the lowest and highest fall of the loss (nats) for each unit of ln(tokens) late in training.

    Lines from each evaluation between half and nine tenths of the tokens to the end of the run, averaged over the
    runs. None where a run has no such evaluation or its loss rises.
    """
    found = []
    for record in (run.record for run in runs):
        end = record.progress.tokens
        late = {tokens: loss for tokens, loss in losses(record).items() if end / 2 <= tokens <= SETTLED * end}
        found.append([(loss - record.validation.loss) / math.log(end / at) for at, loss in late.items()])
    if not found or not all(found):
        return None
    low, high = mean(list(map(min, found))), mean(list(map(max, found)))
    return (low, high) if low >= 0 else None
