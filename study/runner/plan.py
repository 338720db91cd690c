"""Compute iteration counts from the limits of a budget and the seconds of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gpt2.optimizer import warmup_iterations
from runtime.errors import UserError
from runtime.run_plan import WARM_UP_STEPS
from runtime.settings import BudgetConfig, OptimizerConfig
from study.records.plan_file import PlanRow

SAME_SPEED_RATIO = 1.02  # cost classes with step times within this ratio get one count at equal time
SENSIBLE_STEPS = 5  # recommended under a time limit; fewer than 2 WARM_UP_STEPS + 1 are refused


def iteration_counts(
    budget: BudgetConfig, tokens: int, seconds: Mapping[str, float], classes: Sequence[str], equal_time: bool
) -> dict[str, int]:
    """Return the iterations of each cost class: the smallest that time, tokens and iterations allow.

    tokens: of one iteration. seconds: of one iteration by class, needed under a time limit only. All classes get the
    count of the slowest one; with `equal_time` each gets the count of its own step time. The first steps of a process
    are not timed, so a time limit allows WARM_UP_STEPS more.
    """
    timed = (
        _shared_seconds(seconds) if equal_time else dict.fromkeys(seconds, max(seconds.values(), default=0.0))
    )
    return {cost_class: _iterations(budget, tokens, timed.get(cost_class, 0.0)) for cost_class in classes}


def _iterations(budget: BudgetConfig, tokens: int, seconds: float) -> int:
    """Return the iterations that the budget allows. seconds, tokens: of one iteration."""
    limits = []
    if budget.max_time_seconds:
        limits.append(int(budget.max_time_seconds / seconds) + WARM_UP_STEPS)
        if limits[-1] < 2 * WARM_UP_STEPS + 1:
            raise UserError(
                f"CONFIG_GPT2_MAX_TIME={budget.max_time_seconds} is too short: one step takes {seconds:.1f} s on this "
                f"machine; fix: set CONFIG_GPT2_MAX_TIME={math.ceil(SENSIBLE_STEPS * seconds)} or more, or lower "
                "CONFIG_EFFECTIVE_BATCH"
            )
    if budget.max_tokens:
        limits.append(budget.max_tokens // tokens)
        if not limits[-1]:
            raise UserError(
                f"CONFIG_GPT2_MAX_TOKENS={budget.max_tokens} is less than one iteration of {tokens} tokens; fix: "
                f"set CONFIG_GPT2_MAX_TOKENS={tokens} or more"
            )
    if budget.max_iterations:
        limits.append(budget.max_iterations)
    if not limits:
        raise UserError(
            "no budget; fix: set CONFIG_GPT2_MAX_TIME, CONFIG_GPT2_MAX_TOKENS or CONFIG_GPT2_MAX_ITERS above 0"
        )
    return min(limits)


def _shared_seconds(seconds: Mapping[str, float]) -> dict[str, float]:
    """Average the step times of cost classes whose speeds differ by less than 2 %, so that they get one count."""
    groups: list[list[str]] = []
    for cost_class in sorted(seconds, key=lambda name: seconds[name]):
        if groups and seconds[cost_class] <= SAME_SPEED_RATIO * seconds[groups[-1][0]]:
            groups[-1].append(cost_class)
        else:
            groups.append([cost_class])
    means = [sum(seconds[name] for name in group) / len(group) for group in groups]
    return {name: mean for group, mean in zip(groups, means, strict=True) for name in group}


def planned_row(
    cost_class: str, iterations: int, tokens: int, optimizer: OptimizerConfig, predicted_bytes: int | None
) -> PlanRow:
    """Return the row of a variant. tokens: of one iteration."""
    warmup = warmup_iterations(iterations, optimizer.warmup_fraction) if optimizer.schedule == "wsd" else None
    return PlanRow(cost_class, iterations, iterations * tokens, predicted_bytes, warmup)
