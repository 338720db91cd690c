"""The plan of a study, made before its first run: the micro-batch, and how many iterations each variant gets.

A time budget becomes an iteration count here. Real steps of each cost class are timed on the card; from then on
a run is defined by its count, so that it is reproducible, resumes exactly and always ends its schedule. Where the
first steps of the first run show that the machine was busy then, `study.runner.replan` makes the plan anew.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from gpt2.config.batch import BatchPlan, next_smaller
from gpt2.config.config import BudgetConfig, Config, OptimizerConfig
from gpt2.hardware.resolve import ResolvedTarget, target_record
from gpt2.system import files
from gpt2.system.errors import UserError
from gpt2.train.optimizer import warmup_iterations
from gpt2.train.trainer import WARM_UP_STEPS
from ra.variants import Variant
from study.memory.micro_batch import Predictions
from study.runner.settings import StudySettings
from study.stats.statistics import mean, sum_of_squares

SAME_SPEED = 1.02  # cost classes this close get the same count
ROUNDS = 3
STALL = 3.0  # times the median: what a longer step counts as
PIECE = 2.0  # seconds of steps, over which a machine's speed is taken to be one
MOST_MARGIN = 0.05  # of the time limit, that counts leave free
TIMING_SHARE, TIMING_LEAST, TIMING_MOST = 0.05, 15.0, 60.0  # seconds of timing per class, from the time limit


class PlanError(UserError, RuntimeError):
    """The budget or the card does not allow the study as configured."""


class DoesNotFitError(Exception):
    """The card ran out of memory at this micro-batch."""


@dataclass(frozen=True)
class Timing:
    """What timing a cost class gave: seconds of each step, and the peak memory of one, where it was timed alone."""

    seconds: list[float]
    peak_bytes: int | None


# (variant, batch, seconds to spend) -> Timing; raises DoesNotFitError
TimeSteps = Callable[[str, BatchPlan, float], Timing]
# (variants, batch, seconds to spend on each) -> a Timing of each, step by step in turn in one process
TimeTogether = Callable[[Sequence[str], BatchPlan, float], dict[str, Timing]]


def timed_in_turns(
    examples: dict[str, str],
    batch: BatchPlan,
    seconds: float,
    time_steps: TimeSteps,
    time_together: TimeTogether | None = None,
) -> dict[str, Timing]:
    """Each cost class timed in turn (A B A B), so that a drift of the machine falls on all alike.

    seconds: of each class; a class alone has one turn. time_together: turns of a step where there is room for all of
    them at once; else ROUNDS turns of a process.
    """
    if time_together and len(examples) > 1:
        by_name = time_together([*examples.values()], batch, seconds)
        return {cost: by_name[name] for cost, name in examples.items()}
    parts: dict[str, list[Timing]] = {cost: [] for cost in examples}
    rounds = ROUNDS if len(examples) > 1 else 1
    for _ in range(rounds):
        for cost, name in examples.items():
            parts[cost].append(time_steps(name, batch, seconds / rounds))
    return {
        cost: Timing([s for part in timed for s in part.seconds], max(part.peak_bytes or 0 for part in timed))
        for cost, timed in parts.items()
    }


def load_plan(study_dir: Path) -> dict[str, Any] | None:
    """The plan that was made, or None; PlanError where the file cannot be read."""
    path = study_dir / "plan.json"
    if not path.exists():
        return None
    try:
        plan: dict[str, Any] = json.loads(path.read_text())
        plan["variants"], BatchPlan(**plan["batch"])
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{path} cannot be read ({error}); delete it and run `make` to plan anew") from error
    return plan


def save_plan(study_dir: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Write plan.json; from here on the plan stands."""
    files.write_json(study_dir / "plan.json", plan)
    return plan


def make_plan(
    config: Config,
    settings: StudySettings,
    resolved: ResolvedTarget,
    variants: dict[str, Variant],
    time_steps: TimeSteps,
    standing: BatchPlan | None = None,
    margin: float | None = None,
    time_together: TimeTogether | None = None,
) -> dict[str, Any]:
    """Choose the micro-batch, time each cost class and set the counts: the content of plan.json.

    standing: the batch of a plan that stands; the micro-batch is that one, or a smaller one where it does not fit.
    margin: that of a plan that stands. time_together: as `timed_in_turns` has it, on a device whose speed changes and
    whose memory processes share; used where all classes fit at once.
    """
    examples: dict[str, str] = {}  # cost class -> a variant of it
    for name, variant in variants.items():
        examples.setdefault(variant.cost_class, name)
    predictions = Predictions(config, resolved)
    batch = predictions.choose_batch(variants.values(), standing)
    timings: dict[str, Timing] = {}
    while config.budget.max_time_seconds:
        budget = min(max(TIMING_SHARE * config.budget.max_time_seconds, TIMING_LEAST), TIMING_MOST)
        try:
            at_once = [variants[name] for name in examples.values()]
            room = time_together and predictions.fit_together(at_once, batch.micro)
            timings = timed_in_turns(examples, batch, budget, time_steps, time_together if room else None)
            break
        except DoesNotFitError as error:
            smaller = next_smaller(batch)
            if smaller is None:
                raise PlanError(
                    f"{resolved.device_name}: one sequence at a time does not fit: {error}"
                ) from error
            batch = smaller
    seconds = {cost: steady_mean(timing.seconds) for cost, timing in timings.items()}
    if margin is None:
        margin = round(speed_margin([timing.seconds for timing in timings.values()]), 4)
    unpredictable = {
        name: predictions.unpredictable(variant, batch.micro) for name, variant in variants.items()
    }
    counts = iteration_counts(
        config.budget,
        batch.tokens,
        {cost: (1 + margin) * own for cost, own in seconds.items()},
        list(examples),
        settings.budget_equal_tokens,
    )
    return {
        "schema": 1,
        "study": settings.name,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config_sha256": config.sha256,
        "target": target_record(resolved),
        "batch": dataclasses.asdict(batch),
        "budget": dataclasses.asdict(config.budget) | {"equal_tokens": settings.budget_equal_tokens},
        "classes": {
            cost: {
                "seconds_per_iteration": seconds[cost],
                "samples": [round(sample, 6) for sample in timing.seconds],
                "peak_bytes": timing.peak_bytes,
            }
            for cost, timing in timings.items()
        },
        "variants": {
            name: {
                "class": variant.cost_class,
                "iterations": counts[variant.cost_class],
                "tokens": counts[variant.cost_class] * batch.tokens,
                **warmup(config.optimizer, counts[variant.cost_class]),
                "predicted_bytes": None
                if unpredictable[name]
                else predictions.peak_bytes(variant, batch.micro),
            }
            for name, variant in variants.items()
        },
        "evaluation": {
            "interval_tokens": config.evaluation.interval_tokens,
            "grid_tokens": grid(config.evaluation.interval_tokens, max(counts.values()) * batch.tokens),
        },
        "margin": margin,
        "notes": [reason for reason in unpredictable.values() if reason],
    }


def warmup(optimizer: OptimizerConfig, iterations: int) -> dict[str, int]:
    """The warm-up of "wsd" in iterations of the first budget, for its row of the plan: no extension changes it."""
    if optimizer.schedule != "wsd":
        return {}
    return {"warmup_iterations": warmup_iterations(iterations, optimizer.warmup_fraction)}


def extend_row(row: dict[str, Any], factor: Fraction) -> None:
    """Set a row's count to `factor` times that of its first budget, rounded down; the warm-up stays."""
    tokens = row["tokens"] // row["iterations"]
    row["first_iterations"] = row.get("first_iterations", row["iterations"])
    row["iterations"] = int(row["first_iterations"] * factor)
    row["tokens"] = row["iterations"] * tokens


def fall_back(study_dir: Path, plan: dict[str, Any], run: str, dropout: float = 0.0) -> bool:
    """Out of memory in `run`: the next smaller micro-batch for it and all that follow. False when none is left.

    dropout: of the model. What it draws depends on the split, which the note then says.
    """
    before = BatchPlan(**plan["batch"])
    batch = next_smaller(before)
    if batch is None:
        return False
    plan["batch"] = dataclasses.asdict(batch)
    for row in plan["variants"].values():
        row["predicted_bytes"] = None  # it was the larger micro-batch's
    note = (
        f"{run} ran out of memory at micro-batch {before.micro}: from there on {batch.micro}, the effective "
        f"batch of {batch.effective} unchanged"
    )
    if dropout:
        note += (
            f"; with CONFIG_GPT2_DROPOUT={dropout:g} other units are dropped at another micro-batch, so losses from "
            "there on are not those that the larger one would have given"
        )
    plan["notes"].append(note)
    save_plan(study_dir, plan)
    return True


def steady_mean(samples: list[float]) -> float:
    """Mean seconds of a step; a stall counts as STALL medians.

    Slow steps count: a run has them as well, and without them it would take longer than it may.
    """
    longest = STALL * statistics.median(samples)
    return mean([min(sample, longest) for sample in samples])


def speed_margin(timed: Sequence[Sequence[float]]) -> float:
    """The share of a time limit that counts leave free: by how much the machine's speed changed while it was timed.

    timed: seconds of the steps of each class, in order; stalls are left out. It is the relative standard deviation of
    means over PIECE seconds, without what the noise of single steps, as it is from one to the next, makes of it; pooled
    within classes, MOST_MARGIN at most; nothing where no class has two such pieces.
    """
    excess, freedom = 0.0, 0
    for samples in timed:
        longest = STALL * statistics.median(samples)
        steps = [sample for sample in samples if sample <= longest]
        pieces: list[list[float]] = [[]]
        for step in steps:
            pieces[-1].append(step)
            if math.fsum(pieces[-1]) >= PIECE:
                pieces.append([])
        means = [mean(piece) for piece in pieces[:-1]]
        if len(means) > 1:
            noise = mean([(b - a) ** 2 / 2 for a, b in itertools.pairwise(steps)])  # von Neumann (1941)
            expected = (len(means) - 1) * mean([noise / len(piece) for piece in pieces[:-1]])
            excess += (sum_of_squares(means) - expected) / mean(means) ** 2
            freedom += len(means) - 1
    return min(math.sqrt(max(excess, 0.0) / freedom), MOST_MARGIN) if freedom else 0.0


def iteration_counts(
    budget: BudgetConfig, tokens: int, seconds: dict[str, float], classes: list[str], equal_tokens: bool
) -> dict[str, int]:
    """Iterations of each cost class: what ends first of time, tokens and iterations.

    `tokens` is of one iteration; `seconds` of one iteration by class (needed under a time limit only). Classes
    within 2 % of the fastest of their group share its mean. The first steps of a process are not charged to
    the budget, so a time limit buys that many more.
    """
    counts: dict[str, int] = {}
    shared = _shared_seconds(seconds)
    for cost in classes:
        limits = []
        if budget.max_time_seconds:
            limits.append(int(budget.max_time_seconds / shared[cost]) + WARM_UP_STEPS)
            if limits[-1] < 2 * WARM_UP_STEPS + 1:
                raise PlanError(
                    f"a step takes {shared[cost]:.1f} s here, so CONFIG_GPT2_MAX_TIME={budget.max_time_seconds} is "
                    f"hardly a step or two: at least {5 * shared[cost]:.0f} s is sensible, "
                    "or a smaller CONFIG_EFFECTIVE_BATCH"
                )
        if budget.max_tokens:
            limits.append(budget.max_tokens // tokens)
            if not limits[-1]:
                raise PlanError(
                    f"CONFIG_GPT2_MAX_TOKENS={budget.max_tokens} is less than one iteration's {tokens} tokens"
                )
        if budget.max_iterations:
            limits.append(budget.max_iterations)
        if not limits:
            raise PlanError(
                "no budget: set one of CONFIG_GPT2_MAX_TIME, CONFIG_GPT2_MAX_TOKENS or CONFIG_GPT2_MAX_ITERS above 0"
            )
        counts[cost] = min(limits)
    if equal_tokens:
        counts = dict.fromkeys(counts, min(counts.values()))
    return counts


def _shared_seconds(seconds: dict[str, float]) -> dict[str, float]:
    """Classes whose times agree within SAME_SPEED get the mean of their group."""
    groups: list[list[str]] = []
    for cost in sorted(seconds, key=lambda name: seconds[name]):
        if groups and seconds[cost] <= SAME_SPEED * seconds[groups[-1][0]]:
            groups[-1].append(cost)
        else:
            groups.append([cost])
    return {cost: sum(seconds[c] for c in group) / len(group) for group in groups for cost in group}


def grid(interval: int, last: int) -> list[int]:
    """The multiples of `interval` tokens up to `last`; empty when evaluation is at the end only."""
    return list(range(interval, last + 1, interval)) if interval else []
