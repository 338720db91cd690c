"""A plan that stands: variants that are added to it, and what is left of it in the records where plan.json is lost.

Counts that runs were begun with are never changed, whatever the card's speed of today, but by
`study.runner.replan`, before
anything of a run is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from gpt2.artifacts import run_record
from gpt2.config.batch import BatchPlan
from gpt2.config.config import OptimizerConfig
from gpt2.train.trainer import WARM_UP_STEPS
from ra.variants import Variant
from study.runner.plan import SAME_SPEED, PlanError, extend_row, grid, save_plan, warmup

OF_THE_COUNT = ("iterations", "tokens", "warmup_iterations", "first_iterations")  # of a plan's row


def schedules_on_record(study_dir: Path) -> dict[str, dict[str, Any]]:
    """The schedule of each variant whose runs were begun, from their records.

    PlanError where runs were extended: the factor and the first counts stood in plan.json alone.
    """
    extended = sorted(path.parent.name for path in (study_dir / "runs").glob("*/run-[0-9]*.json"))
    if extended:
        raise PlanError(
            f"{study_dir / 'plan.json'} is gone and the study was extended ({extended[0]} was longer than its first "
            "budget), which no other file says exactly; right: plan.json as it was, or another CONFIG_STUDY_NAME"
        )
    schedules = {}
    for folder in sorted((study_dir / "runs").glob("*/")):
        with contextlib.suppress(run_record.RecordError):
            seen = run_record.load(folder)
            if seen["schedule"]:
                schedules[str(seen["variant"])] = dict(seen["schedule"])
    return schedules


def with_counts(
    plan: dict[str, Any], schedules: dict[str, dict[str, Any]], optimizer: OptimizerConfig
) -> dict[str, Any]:
    """The plan with the counts and warm-ups of runs that were begun under one that is lost."""
    restored = {name: row for name, row in plan["variants"].items() if name in schedules}
    for name, row in restored.items():
        count = int(schedules[name]["iterations"])
        if count != row["iterations"]:
            plan["notes"].append(
                f"plan.json was made anew; {name} keeps the {count} iterations that its runs were begun with "
                f"(timed now: {row['iterations']})"
            )
        row["tokens"] = row["tokens"] // row["iterations"] * count
        row["iterations"] = count
        row |= warmup(optimizer, count)
        if "warmup_iterations" in row:
            row["warmup_iterations"] = int(schedules[name].get("warmup_iterations", row["warmup_iterations"]))
    for name, row in plan["variants"].items():
        if restored and name not in restored and plan["budget"].get("equal_tokens"):
            _share_count(plan, name, row, next(iter(restored.values())))
    return _with_grid(plan)


def with_variants(
    study_dir: Path,
    plan: dict[str, Any],
    variants: dict[str, Variant],
    remake: Callable[[BatchPlan, float], dict[str, Any]],
) -> dict[str, Any]:
    """The plan with the variants that were added since it was made; the counts that stand are never changed.

    A new variant of a known cost class takes that class's count. One of a new class needs timing: `remake` gives
    a plan of today, with the margin and at the micro-batch that stand or at a smaller one where that does not fit,
    from which the new variants' rows are taken. Under BUDGET_EQUAL_TOKENS their count is the standing one all the same.
    """
    missing = {name: variant for name, variant in variants.items() if name not in plan["variants"]}
    if not missing:
        return plan
    known = {row["class"]: row for row in plan["variants"].values()}
    strange = [name for name, variant in missing.items() if variant.cost_class not in known]
    fresh = remake(BatchPlan(**plan["batch"]), plan.get("margin", 0.0)) if strange else plan
    if fresh["batch"] != plan["batch"]:
        _step_down(plan, fresh, strange)
    plan["classes"] = fresh["classes"] | plan["classes"]
    plan["notes"] += [note for note in fresh["notes"] if note not in plan["notes"]]
    standing = next(iter(plan["variants"].values()), None)
    for name, variant in missing.items():
        if variant.cost_class in known:
            plan["variants"][name] = dict(known[variant.cost_class])
            continue
        row = plan["variants"][name] = fresh["variants"][name]
        if standing and plan["budget"].get("equal_tokens"):
            _share_count(plan, name, row, standing)
        elif "extended" in plan:
            extend_row(row, Fraction(str(plan["extended"])))
    return save_plan(study_dir, _with_grid(plan))


def _step_down(plan: dict[str, Any], fresh: dict[str, Any], added: list[str]) -> None:
    """Give the plan the smaller micro-batch of `fresh`, which the variants that were added need."""
    before, after = BatchPlan(**plan["batch"]), BatchPlan(**fresh["batch"])
    plan["batch"] = dataclasses.asdict(after)
    for name, row in plan["variants"].items():
        row["predicted_bytes"] = fresh["variants"].get(name, {}).get("predicted_bytes")
    plan["notes"].append(
        f"{', '.join(added)} was added and does not fit at micro-batch {before.micro}: from there on {after.micro}, "
        f"the effective batch of {after.effective} unchanged"
    )


def _share_count(plan: dict[str, Any], name: str, row: dict[str, Any], standing: dict[str, Any]) -> None:
    """BUDGET_EQUAL_TOKENS: the count of a row that stands, and the time that it takes where that is longer."""
    row |= {key: standing[key] for key in OF_THE_COUNT if key in standing}
    limit = plan["budget"]["max_time_seconds"]
    if not limit or row["class"] not in plan["classes"]:
        return
    seconds = (row["iterations"] - WARM_UP_STEPS) * plan["classes"][row["class"]]["seconds_per_iteration"]
    if seconds > SAME_SPEED * limit:
        row["time_factor"] = round(seconds / limit, 3)
        plan["notes"].append(
            f"{name} gets the others' {row['iterations']} iterations (CONFIG_BUDGET_EQUAL_TOKENS=y), which take it "
            f"about {seconds:.0f} s of training where {limit:g} s were asked for"
        )


def _with_grid(plan: dict[str, Any]) -> dict[str, Any]:
    last = max(row["tokens"] for row in plan["variants"].values())
    evaluation = plan["evaluation"]
    evaluation["grid_tokens"] = grid(evaluation["interval_tokens"], last)
    return plan
