"""Describe a plan and a finished run on the terminal, and estimate the seconds of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from referee.verdict.statistics import mean
from runtime import run_record
from runtime.output import duration
from runtime.settings import EvaluationConfig
from study.records.hellaswag_scores import TASKS, entry
from study.records.plan_file import Plan
from study.runner.terminal import short

FORWARD_SHARE = (
    1 / 3
)  # of the seconds of a training token that a scored token takes; backward takes two thirds
START_SECONDS = 3.0  # of the process of a run, until its first step
MAPS_SECONDS = 1.0  # of the attention maps of an arm, after the last run
# with their four endings: tokens of an item of HellaSwag, about, and of all items of the continuation choice
HELLASWAG_TOKENS, HELLASWAG_ITEMS, CHOICE_TOKENS = 400, 10_042, 30_720


def expected_seconds(plan: Plan, evaluation: EvaluationConfig) -> float | None:
    """Return the seconds of an average run: its start, training and evaluations; None if no steps were timed."""
    found = []
    for name, row in plan.variants.items():
        if (seconds := plan.planned_seconds(name)) is not None:
            during = evaluation.interval_tokens and (row.tokens - 1) // evaluation.interval_tokens
            share = FORWARD_SHARE * during * evaluation.tokens / row.tokens
            found.append(START_SECONDS + seconds * (1 + share + final_share(plan, evaluation)))
    return mean(found) if found else None


def final_share(plan: Plan, evaluation: EvaluationConfig) -> float:
    """Return the seconds of the evaluation after the last step, relative to those of training."""
    items = HELLASWAG_TOKENS * (evaluation.hellaswag_limit or HELLASWAG_ITEMS)
    scored = evaluation.tokens + (items if evaluation.hellaswag else CHOICE_TOKENS)
    return FORWARD_SHARE * scored / mean([row.tokens for row in plan.variants.values()])


def summary(
    plan: Plan, variants: Sequence[str], left: int, runs: int, each: float | None, slots: int = 1
) -> str:
    """Describe the batch, the iterations of each variant, the number of pending runs and of runs at once.

    each: seconds of an average run.
    """
    batch = plan.batch
    iterations = {name: plan.variants[name].iterations for name in variants}
    if len({*iterations.values()}) == 1:
        counts = f"{next(iter(iterations.values()))} for every variant"
    else:
        counts = ", ".join(f"{name} {count}" for name, count in iterations.items())
    ranks = f" x {batch.world_size} ranks" if batch.world_size > 1 else ""
    return (
        f"batch {batch.effective} sequences of {batch.block_size} tokens "
        f"= micro {batch.micro} x accumulation {batch.accumulation}{ranks}; iterations: {counts}\n"
        f"{left} of {runs} runs pending"
        + (f", {slots} at once" if slots > 1 else "")
        + (f", threads of a run: {plan.threads}" if plan.threads else "")
        + (f", about {duration(math.ceil(left / max(slots, 1)) * each)}" if each else "")
    )


def beside_note(slots: int) -> str:
    """Return the note for the report on runs at once; empty for one at a time."""
    if slots < 2:
        return ""
    return (
        f"up to {slots} runs trained at once: the tokens per second and the training seconds of a run were measured "
        "beside other runs; step time ratios were measured before the runs, in turns"
    )


def outcome(run_dir: Path) -> str:
    """Describe a finished run in one line, or the reason why it is not finished."""
    try:
        record = run_record.load(run_dir)
    except run_record.RecordError as error:
        return str(error)
    if record.status != "finished":
        return f"{record.status}: {record.error}"
    validation, progress = record.validation, record.progress
    parts = [f"perplexity {validation.perplexity:.2f}"] if validation and validation.perplexity else []
    for task in TASKS:
        if (score := entry(record, task)) and score.acc is not None:
            spread = "" if score.acc_stderr is None else f" +- {score.acc_stderr:.1%}"
            parts.append(f"{task.name} {score.acc:.1%}{spread}")
    if progress:
        parts.append(f"{short(progress.tokens)} tokens in {duration(progress.train_seconds)} of training")
    if record.throughput and record.throughput.tokens_per_second:
        parts.append(f"{record.throughput.tokens_per_second:,.0f} tok/s")
    if record.memory and record.memory.peak_allocated_bytes is not None:
        parts.append(f"{record.memory.peak_allocated_bytes / 2**30:.2f} GiB")
    return "  ".join(parts)
