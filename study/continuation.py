"""CONFIG_CONTINUES: runs that start where the decay of a shorter study's runs began.

A run with the schedule "wsd" has the learning rates of every longer run until its decay begins, if the warm-ups are
equal. Its state at that point is saved in <run>/stable. A cosine schedule has no such state. The shorter study is read
and never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ra import arms
from ra.arms import parse_arm
from referee.pages.markup import to_plain
from runtime import checkpoint, run_record
from runtime.dotconfig import read_text
from runtime.errors import UserError
from study import plan_file
from study.plan_file import Continued, Plan
from study.preconditions import differing_symbols, symbol_values
from study.report.report_data import build_report
from study.report.report_summary import findings
from study.study_settings import ONLY_WSD


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
