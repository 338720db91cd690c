"""Plan a study before its first run: the micro-batch, and the number of iterations of each variant.

Variants are counted in a process of their own (`count_arms`); the study's process never imports one.

A time limit becomes a number of iterations here: steps of each cost class are timed on the device. A run is then
defined by its count, so it is reproducible, can be resumed and finishes its schedule, whatever else the machine does.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2.optimizer import warmup_iterations
from ra.arms import parse_arm
from runtime.batch_plan import WARM_UP_STEPS, BatchPlan, next_smaller, plan_batch
from runtime.errors import UserError
from runtime.records import Record
from runtime.resolved_target import ResolvedTarget, target_record
from runtime.run_record import RecordedTarget
from runtime.settings import BudgetConfig, Config, OptimizerConfig
from study.plan_file import CostClass, Plan, PlanBudget, PlanRow
from study.planning.micro_batch import Predictions
from study.runs import BASELINE
from study.step_timing import DoesNotFitError, TimeSteps, Timing, steady_mean, step_time_ratios, time_in_turns
from study.study_settings import StudySettings

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


if TYPE_CHECKING:
    from ra.variants import Variant

TIMING_SHARE, TIMING_LEAST, TIMING_MOST = 0.05, 15.0, 60.0  # seconds of timing per class, from the time limit
# With a count, step times serve estimates and the comparison of speeds. Seconds per class; parameters x tokens of all
# runs, about 200 seconds of a core, below which the timing would be too large a part of the study.
COUNT_SECONDS, COUNT_WORK = 4.0, 2e12
# Classes in one process. torch.compile keeps 8 graphs of a function, then stops compiling it; a class has at most two.
MOST_TOGETHER = 4
TIMED_AT_ONCE = (
    "step times were measured in {} processes at once, each on its share of the cores, as the runs train"
)


@dataclass(frozen=True)
class CountedArm:
    """An arm of the study. notes: on its width, recipe and memory. peak_bytes: predicted, None where it cannot be."""

    cost_class: str
    optimizer: OptimizerConfig
    notes: tuple[str, ...]
    peak_bytes: int | None


@dataclass(frozen=True)
class CountedArms:
    """The arms at the micro-batch that fits them all. fit_together: one model of each cost class in one process."""

    batch: BatchPlan
    arms: Mapping[str, CountedArm]
    fit_together: bool


class CountArms(Record, tag=True, frozen=True):
    """Asks for `count_arms`."""

    study: StudySettings
    resolved: ResolvedTarget
    existing: BatchPlan | None
    copies: int


class Steps(Record, tag=True, frozen=True):
    """Asks for the seconds of steps of arms, one of each in turn. seconds: for each of them."""

    arms: tuple[str, ...]
    micro: int
    seconds: float


class Device(Record, tag=True, frozen=True):
    """Asks for the device of a machine."""


Asked = CountArms | Steps | Device


class Question(Record, frozen=True):
    """What the study asks a process that may import variants: see study.worker."""

    settings: Config
    asked: Asked


Count = Callable[
    [BatchPlan | None], CountedArms
]  # at the batch of a previous plan, or a smaller one that fits


def count_arms(
    config: Config,
    settings: StudySettings,
    resolved: ResolvedTarget,
    variants: Mapping[str, Variant],
    existing: BatchPlan | None = None,
    copies: int = 1,
) -> CountedArms:
    """Predict the memory of each arm and choose the micro-batch. copies: runs at once, which share the memory."""
    predictions = Predictions(config, resolved, copies)
    batch = predictions.choose_batch(variants.values(), existing)
    arms = {}
    for name, variant in variants.items():
        unknown = predictions.unpredictable(variant, batch.micro)
        notes = tuple(filter(None, (unknown, variant.note, recipe_note(variant, config))))
        peak = None if unknown else predictions.peak_bytes(variant, batch.micro)
        arms[name] = CountedArm(variant.cost_class, variant.configure(config).optimizer, notes, peak)
    classes = {variant.cost_class: variant for variant in variants.values()}
    together = len(classes) <= MOST_TOGETHER and predictions.fit_together([*classes.values()], batch.micro)
    return CountedArms(batch, arms, together)


def grpo_arms(config: Config, settings: StudySettings, existing: BatchPlan | None) -> CountedArms:
    """Return the arms of a GRPO study, whose steps cost the same. No memory is predicted."""
    assert config.grpo
    batch = existing or plan_batch(config.batch.effective, config.batch.micro, 1, config.grpo.response_tokens)
    arms = {name: CountedArm("grpo", config.optimizer, (), None) for name in settings.variants}
    return CountedArms(batch, arms, fit_together=False)


def make_plan(
    config: Config,
    settings: StudySettings,
    resolved: ResolvedTarget,
    count: Count,
    time_steps: TimeSteps,
    existing: BatchPlan | None = None,
    copies: int = 1,
) -> Plan:
    """Choose the micro-batch, time each cost class and set the counts.

    existing: batch of a previous plan; its micro-batch is used, or a smaller one if it does not fit.
    copies: processes that time steps at once and share the device's memory.
    """
    counted = count(existing)
    timings: dict[str, Timing] = {}
    each = timing_seconds(config, settings, resolved)
    if each:
        counted, timings = _time_classes(each, resolved, counted, count, time_steps)
    batch, arms = counted.batch, counted.arms
    seconds = {cost: steady_mean(timing.samples) for cost, timing in timings.items()}
    examples = _examples(arms)
    counts = iteration_counts(config.budget, batch.tokens, seconds, list(examples), settings.equal_time)
    baseline = arms.get(BASELINE, next(iter(arms.values()))).cost_class
    return Plan(
        task="grpo" if config.grpo else "gpt2",
        study=settings.name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        config_sha256=config.sha256,
        target=RecordedTarget(**target_record(resolved)),
        batch=batch,
        budget=PlanBudget(**dataclasses.asdict(config.budget), equal_time=settings.equal_time),
        classes={
            cost: CostClass(
                seconds[cost], tuple(round(sample, 6) for sample in timing.samples), timing.peak_bytes
            )
            for cost, timing in timings.items()
        },
        step_time_ratios=step_time_ratios(timings, baseline),
        variants={
            name: planned_row(
                arm.cost_class, counts[arm.cost_class], batch.tokens, arm.optimizer, arm.peak_bytes
            )
            for name, arm in arms.items()
        },
        notes=tuple(note for arm in arms.values() for note in arm.notes)
        + ((TIMED_AT_ONCE.format(copies),) if timings and copies > 1 else ()),
    )


def timing_seconds(config: Config, settings: StudySettings, resolved: ResolvedTarget) -> float:
    """Return the seconds of timing for each cost class; 0 where no steps are timed."""
    budget = config.budget
    if budget.max_time_seconds:
        return min(max(TIMING_SHARE * budget.max_time_seconds, TIMING_LEAST), TIMING_MOST)
    if config.grpo:
        return 0.0
    counts = (budget.max_tokens, budget.max_iterations * config.batch.effective * config.model.block_size)
    tokens = min(filter(None, counts)) * len(settings.variants) * settings.seeds
    here = resolved.device_type == "cpu" and settings.executor == "local"
    return COUNT_SECONDS if here and config.model.parameters * tokens > COUNT_WORK else 0.0


def load_note(config: Config) -> str:
    """Return a note where other work changes the counts that step times are about to give; else ""."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if not config.budget.max_time_seconds or load <= cpus:
        return ""
    return (
        f"step times were measured at a load of {load:.0f} on {cpus} CPUs: the number of iterations, which follows "
        "from them, is not that of an idle machine"
    )


def recipe_note(variant: Variant, config: Config) -> str:
    """Name the optimizer settings of an arm that are not the study's, but for the rate in its name; "" without any."""
    other = [
        f"{setting} {value:g} (the study: {getattr(config.optimizer, setting):g})"
        for setting, value in variant.recipe.items()
        if not (setting == "learning_rate" and parse_arm(variant.name).rate)
    ]
    return f"{variant.name} has {', '.join(other)}" if other else ""


def _examples(arms: Mapping[str, CountedArm]) -> dict[str, str]:
    """Return cost class -> its first arm."""
    found: dict[str, str] = {}
    for name, arm in arms.items():
        found.setdefault(arm.cost_class, name)
    return found


def _time_classes(
    seconds: float,
    resolved: ResolvedTarget,
    counted: CountedArms,
    count: Count,
    time_steps: TimeSteps,
) -> tuple[CountedArms, dict[str, Timing]]:
    """Time the classes at the largest micro-batch, from the counted one down, at which none runs out of memory.

    In one process where they fit in memory together, which saves a start and a compilation of each. A micro-batch is
    too large only where a class alone does not fit. seconds: of each class.
    """
    together = counted.fit_together
    while True:
        try:
            return counted, time_in_turns(
                _examples(counted.arms), counted.batch, seconds, time_steps, together
            )
        except DoesNotFitError as error:
            if together:
                together = False
                continue
            smaller = next_smaller(counted.batch)
            if smaller is None:
                raise UserError(
                    f"{resolved.device_name}: a micro-batch of one sequence does not fit in memory: {error}; fix: "
                    "lower CONFIG_GPT2_BLOCK_SIZE or the model's size, or use another device"
                ) from error
            counted = count(smaller)


def smaller_batch(plan: Plan, run: str, dropout: float = 0.0) -> Plan | None:
    """Return the plan with the next smaller micro-batch, after `run` ran out of memory; None at micro-batch 1.

    dropout: of the model. Its masks depend on the micro-batch; the note then says so.
    """
    batch = next_smaller(plan.batch)
    if batch is None:
        return None
    note = (
        f"{run} ran out of memory at micro-batch {plan.batch.micro}; later steps use {batch.micro}. The effective "
        f"batch of {batch.effective} does not change"
    )
    if dropout:
        note += (
            f". With CONFIG_GPT2_DROPOUT={dropout:g} the micro-batch changes the dropout masks, so later losses differ "
            "from those at the larger micro-batch"
        )
    # predictions were of the larger micro-batch
    variants = {name: row.replace(predicted_bytes=None) for name, row in plan.variants.items()}
    return plan.replace(batch=batch, variants=variants, notes=(*plan.notes, note))
