"""Amend an existing plan: add variants, or continue a shorter study.

Counts of existing runs never change, even if the speed of the device changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpt2.optimizer import warmup_iterations
from ra import arms
from ra.arms import control_arms, judged_arms, parse_arm
from referee.pages.markup import to_plain
from referee.verdict.design import Design
from runtime import checkpoint, run_record
from runtime.batch_plan import BatchPlan
from runtime.dotconfig import read_text
from runtime.errors import UserError
from runtime.settings import OptimizerConfig
from study import plan_file
from study.plan_file import Continued, Plan, PlanFileError, PlanRow
from study.planner import CountedArm
from study.preconditions import differing_symbols, earlier_looks, symbol_values
from study.report.report_data import build_report
from study.report.report_summary import findings
from study.runs import read_records
from study.study_settings import ONLY_WSD, StudySettings
from study.tuned_rates import FILE, FOLDER, read_choice


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
    return plan_file.write(study_dir, plan.replace(variants=rows))


def with_design(study_dir: Path, plan: Plan, settings: StudySettings) -> Plan:
    """Return the plan with the design from before the first run, and what was added since."""
    choice = read_choice(study_dir)
    controls, arms = _compared(settings.variants, None if choice is None else {*choice.names.values()})
    if read_records(study_dir):
        if plan.design is None:
            raise PlanFileError(
                f"{study_dir / plan_file.FILE} has no design, and the study has runs; {plan_file.RESTORE}"
            )
        last = max((*plan.design.looks, *plan.later_looks))
        new = {
            name: max(settings.seeds, last) for name in arms if name not in (*plan.design.arms, *plan.added)
        }
        later = (*plan.later_looks, settings.seeds) if settings.seeds > last else plan.later_looks
        return plan.replace(added={**plan.added, **new}, later_looks=later)
    earlier: tuple[int, ...] = ()
    if (config := study_dir / "config").exists():
        text = read_text(config)
        earlier = earlier_looks(settings.results_dir, text, settings.primary, settings.seed_range)
    design = Design(
        controls=tuple(controls),
        arms=tuple(arms),
        primary=settings.primary,
        seeds=tuple(settings.seed_range),
        looks=(settings.seeds,),
        margin=settings.equivalence_margin,
        earlier_looks=earlier,
        choice="" if choice is None else f"{FOLDER}/{FILE}",
        **({"metric": "final accuracy on the test problems"} if plan.task == "grpo" else {}),
    )
    return plan.replace(design=design.hashed, added={}, later_looks=())


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


# CONFIG_CONTINUES: runs that start where the decay of a shorter study's runs began.
#
# A run with the schedule "wsd" has the learning rates of every longer run until its decay begins, if the warm-ups are
# equal. Its state at that point is saved in <run>/stable. A cosine schedule has no such state. The shorter study is
# read and never changed.


def check_starts(shorter: Path, config_text: str, runs: Sequence[tuple[str, int]]) -> None:
    """Raise UserError unless each of these runs can start from its run in the study `shorter`."""
    _shorter_plan(shorter)
    before = read_text(shorter / "config")
    if symbol_values(before).get("SCHEDULE_WSD") != "y":
        raise UserError(f"CONFIG_CONTINUES={shorter} {ONLY_WSD}")
    if differing := differing_symbols(before, config_text, {"numbers"}, {"budget", "start"}):
        raise UserError(
            f"CONFIG_CONTINUES={shorter} has other settings ({'; '.join(differing)}), so no run can start from it; "
            f"fix: set the values of {shorter / 'config'} in .config"
        )
    for name, seed in runs:
        folder = shorter / "runs" / run_record.run_name(name, seed)
        if problem := _problem(folder):
            raise UserError(
                f"CONFIG_CONTINUES: {problem}; fix: finish {folder.name} in {shorter}, or remove {name} or seed {seed} "
                "from .config"
            )


def _problem(folder: Path) -> str:
    """Return why no run can start from this one; "" where one can."""
    try:
        record = run_record.load(folder)
        states = checkpoint.complete(folder / "stable")
        for state in states:
            checkpoint.verify(state)
    except UserError as error:
        return str(error)
    arm = parse_arm(record.variant)
    if arm.noise:
        return f"{folder}: the size of its noise depends on the planned iterations"
    for source in (arms.source(name) for name in arm.file_variants if arms.is_custom(name)):
        copy = folder.parents[1] / "own" / source.name
        if not copy.is_file() or copy.read_bytes() != source.read_bytes():
            return f"{source} differs from {copy}, the source of that run"
    if record.status != "finished" or record.truncated:
        return f"{folder} is {'cut by a time limit' if record.truncated else record.status}"
    if damage := run_record.altered(record, folder):
        return f"{folder} is damaged: {'; '.join(damage)}"
    return "" if states else f"{folder / 'stable'} has no checkpoint of the start of its decay"


def continued(plan: Plan, shorter: Path, seed: int) -> Plan:
    """Return the plan with the warm-ups of the study `shorter`, which is on record. UserError for no larger count.

    seed: of a run that it has.
    """
    known = plan.continues
    added = [name for name in plan.variants if known is None or name not in known.iterations]
    if not added:
        return plan
    before, rows = _shorter_plan(shorter).variants, dict(plan.variants)
    for name in added:
        if rows[name].iterations <= before[name].iterations:
            raise UserError(
                f"{name} is planned for {rows[name].iterations} iterations, and CONFIG_CONTINUES={shorter} has "
                f"{before[name].iterations}: a run can only continue a shorter one; fix: raise the limit "
                "CONFIG_GPT2_MAX_ITERS, CONFIG_GPT2_MAX_TOKENS or CONFIG_GPT2_MAX_TIME"
            )
        rows[name] = rows[name].replace(warmup_iterations=before[name].warmup_iterations)
    if known is None:
        record = run_record.load(shorter / "runs" / run_record.run_name(added[0], seed))
        assert record.fingerprint  # of a finished run
        verdicts = tuple(to_plain(finding.sentence) for finding in findings(build_report(shorter)))
        known = Continued(str(shorter), record.fingerprint.schedule, verdicts)
    counts = {**known.iterations, **{name: before[name].iterations for name in added}}
    return plan.replace(variants=rows, continues=known.replace(iterations=counts))


def _shorter_plan(shorter: Path) -> Plan:
    if plan := plan_file.read(shorter):
        return plan
    raise UserError(
        f"CONFIG_CONTINUES={shorter} has no plan.json; fix: CONFIG_CONTINUES=results/NAME of a study"
    )
