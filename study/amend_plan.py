"""Amend an existing plan: add variants, or rebuild a lost plan.json from run records.

Counts of existing runs never change, even if the speed of the device changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpt2.optimizer import warmup_iterations
from ra.arms import control_arms, judged_arms
from referee.verdict.design import Design
from runtime.batch_plan import BatchPlan
from runtime.run_record import Schedule
from runtime.settings import OptimizerConfig
from study import plan_file
from study.experiment import planned_seeds, recorded_primary, recorded_settings
from study.plan_file import Plan, PlanRow
from study.planner import SAME_SPEED_RATIO, CountedArm, planned_row
from study.runs import read_records
from study.study_settings import StudySettings
from study.tuned_rates import FILE, FOLDER, read_choice


def recorded_schedules(study_dir: Path) -> dict[str, Schedule]:
    """Return the recorded schedule of each variant that has a run."""
    records = read_records(study_dir).values()
    return {record.variant: record.schedule for record in records if record.schedule}


def restore_counts(plan: Plan, schedules: Mapping[str, Schedule], arms: Mapping[str, CountedArm]) -> Plan:
    """Return the plan with the recorded counts and warm-ups of existing runs, after plan.json was lost.

    With equal counts every other variant also gets the recorded count. arms: of the study.
    """
    rows, notes = dict(plan.variants), list(plan.notes)
    for name in rows.keys() & schedules.keys():
        row, schedule = rows[name], schedules[name]
        count = schedule.iterations
        if count != row.iterations:
            notes.append(
                f"plan.json was rebuilt; {name} has the {count} iterations of its existing runs "
                f"(new step times give {row.iterations})"
            )
        tokens = row.tokens // row.iterations
        restored = planned_row(row.cost_class, count, tokens, arms[name].optimizer, row.predicted_bytes)
        rows[name] = restored.replace(warmup_iterations=schedule.warmup_iterations)
    recorded = next((rows[name] for name in rows if name in schedules), None)
    if recorded and not plan.budget.equal_time:
        rows |= {
            name: _own_warmup(_share_count(row, recorded), arms[name].optimizer)
            for name, row in rows.items()
            if name not in schedules
        }
    return plan.replace(variants=rows, notes=tuple(notes))


def with_variants(
    study_dir: Path,
    plan: Plan,
    arms: Mapping[str, CountedArm],
    replan: Callable[[BatchPlan], Plan],
) -> Plan:
    """Return the plan with the arms that .config added; existing counts never change.

    A variant of a known cost class takes the row of that class. For a new class `replan` times steps now, at the
    existing micro-batch or at a smaller one where that does not fit. The new row takes the existing count; at equal
    time it takes the count of its own step time. Its warm-up is its own.
    """
    missing = {name: arm for name, arm in arms.items() if name not in plan.variants}
    if not missing:
        return plan
    known = {row.cost_class: row for row in plan.variants.values()}
    unknown = [name for name, arm in missing.items() if arm.cost_class not in known]
    fresh = replan(plan.batch) if unknown else plan
    if fresh.batch != plan.batch:
        plan = _step_down(plan, fresh, unknown)
    plan = plan.replace(
        classes={**fresh.classes, **plan.classes},
        step_time_ratios={**fresh.step_time_ratios, **plan.step_time_ratios},
        notes=tuple(dict.fromkeys((*plan.notes, *fresh.notes))),
    )
    rows, existing = dict(plan.variants), next(iter(plan.variants.values()), None)
    for name, arm in missing.items():
        if arm.cost_class in known:
            rows[name] = _own_warmup(known[arm.cost_class], arm.optimizer)
            continue
        row = fresh.variants[name]
        if existing and not plan.budget.equal_time:
            row = _share_count(row, existing)
        rows[name] = _own_warmup(row, arm.optimizer)
    plan = plan.replace(variants=rows)
    notes = (*plan.notes, *filter(None, (_longer_than_the_limit(plan, name) for name in unknown)))
    return plan_file.write(study_dir, plan.replace(notes=notes))


def with_design(study_dir: Path, plan: Plan, settings: StudySettings) -> Plan:
    """Return the plan with the design from before the first run, and what was added since.

    Where plan.json lacks the design, it is that in the configurations of the runs.
    """
    choice = read_choice(study_dir)
    tuned = None if choice is None else {*choice.names.values()}

    def planned(variants: Sequence[str], primary: str, seeds: int) -> Design:
        controls, arms = _compared(variants, tuned)
        return Design(
            controls=tuple(controls),
            arms=tuple(arms),
            primary=primary,
            seeds=tuple(range(settings.first_seed, settings.first_seed + seeds)),
            looks=(seeds,),
            margin=settings.equivalence_margin,
            choice="" if tuned is None else f"{FOLDER}/{FILE}",
        ).hashed

    def grown(plan: Plan, variants: Sequence[str], seeds: int) -> Plan:
        """Append the arms that the design lacks, and a larger number of seeds as a look."""
        assert plan.design
        last, (_, arms) = max((*plan.design.looks, *plan.later_looks)), _compared(variants, tuned)
        new = {name: max(seeds, last) for name in arms if name not in (*plan.design.arms, *plan.added)}
        later = (*plan.later_looks, seeds) if seeds > last else plan.later_looks
        return plan.replace(added={**plan.added, **new}, later_looks=later)

    recorded = [one for one in recorded_settings(study_dir) if planned_seeds(one)]
    if not recorded:
        design = planned(settings.variants, settings.primary, settings.seeds)
        return plan.replace(design=design, added={}, later_looks=())
    if plan.design is None:
        first, *others = ((one, one.get("VARIANTS", "").split(), planned_seeds(one)) for one in recorded)
        plan = plan.replace(design=planned(first[1], recorded_primary(first[0]) or "", first[2]))
        for _, variants, seeds in others:
            plan = grown(plan, variants, seeds)
    return grown(plan, settings.variants, settings.seeds)


def _compared(variants: Sequence[str], tuned: set[str] | None) -> tuple[list[str], list[str]]:
    """Return the control arms and the judged arms. tuned: the arms at their rates, where rates are tuned."""
    if tuned is None:
        return control_arms(variants), judged_arms(variants)
    chosen = [name for name in variants if name in tuned]
    controls = control_arms(chosen)
    return controls, [name for name in chosen if name not in controls]


def _step_down(plan: Plan, fresh: Plan, added: list[str]) -> Plan:
    """Give the plan the smaller micro-batch of `fresh`, which the added variants need."""
    rows = {
        name: row.replace(
            predicted_bytes=fresh.variants[name].predicted_bytes if name in fresh.variants else None
        )
        for name, row in plan.variants.items()
    }
    note = (
        f"added: {', '.join(added)}; does not fit in memory at micro-batch {plan.batch.micro}; later steps of all "
        f"runs use {fresh.batch.micro}. The effective batch of {fresh.batch.effective} does not change"
    )
    return plan.replace(batch=fresh.batch, variants=rows, notes=(*plan.notes, note))


def _share_count(row: PlanRow, existing: PlanRow) -> PlanRow:
    """Return the row with the count and warm-up of an existing one."""
    return existing.replace(cost_class=row.cost_class, predicted_bytes=row.predicted_bytes)


def _own_warmup(row: PlanRow, optimizer: OptimizerConfig) -> PlanRow:
    """Return the row with the warm-up of these settings, which an arm may change."""
    if row.warmup_iterations is None:
        return row
    warmup = warmup_iterations(row.iterations, optimizer.warmup_fraction)
    return row.replace(warmup_iterations=warmup)


def _longer_than_the_limit(plan: Plan, name: str) -> str:
    """Return a note if the existing count takes an added variant longer than the time limit; else empty."""
    limit, seconds = plan.budget.max_time_seconds, plan.planned_seconds(name)
    if not limit or seconds is None or seconds <= SAME_SPEED_RATIO * limit:
        return ""
    return (
        f"added: {name}, with the same {plan.variants[name].iterations} iterations as the existing variants; "
        f"it trains for about {seconds:.0f} s, longer than the limit of {limit:g} s"
    )
