"""Extend finished runs, and undo an extension.

A run of N iterations with the schedule "wsd" has the learning rates of every longer run until its decay begins, if the
warm-ups are equal. That state is saved in <run>/stable. A cosine schedule has no such state.

    plan.json       the new counts; `extended` times the first budget. Written first: it decides the length
    plan-N.json     the plan before; N is its largest count
    <run>/run-N.json, metrics-N.jsonl, ..., checkpoint-N/, stable-N/   results and states of the run at N iterations
    undo.json       exists while an extension is being undone
    undone-M/       plan and runs of M iterations that were undone: a study folder for reports
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from gpt2.artifacts import checkpoint, eval_sets, metrics_log, run_record
from gpt2.artifacts.run_record import RunRecord
from gpt2.artifacts.typed_json import JsonObject, read_file
from gpt2.config.config import Config, OptimizerConfig
from gpt2.system import files
from gpt2.system.errors import UserError
from gpt2.system.read_files import DamagedFileError, read_bytes
from gpt2.train.optimizer import decay_start
from ra.arms import parse_arm
from study.records import plan_file
from study.records.integrity import REMEDY, disagreements
from study.records.lengths import saved_counts, saved_name
from study.records.plan_file import Plan, PlanBudget
from study.records.present import read_record, read_records
from study.runner.plan import extended_row
from study.runner.preconditions import locked, refuse_another_configuration, require_space
from study.runner.settings import StudySettings

DECIMAL = re.compile(r"[0-9]+(\.[0-9]+)?")
SAVED = (*run_record.SIDE_FILES, eval_sets.FILE, "run.json")  # run.json last: it marks the end
END_RESULTS = ("hellaswag.json", "validation_windows.json", eval_sets.FILE)  # only a finished run has them

UNDO = "undo.json"


@dataclass(frozen=True)
class Undo(JsonObject):
    """The content of undo.json. previous: name of the plan to restore. into: name of the folder for longer results."""

    previous: str
    into: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"plan-[0-9]+\.json", self.previous) or not re.fullmatch(
            r"undone-[0-9.]+", self.into
        ):
            raise ValueError(f"{self.previous!r} and {self.into!r} are not the names of a plan and a folder")


def parse_factor(text: str) -> Fraction:
    """Return FACTOR as an exact fraction."""
    if not DECIMAL.fullmatch(text) or Fraction(text) <= 1:
        raise UserError(f"FACTOR={text} does not extend a run; fix: use a decimal above 1, such as FACTOR=2")
    return Fraction(text)


def extend(config: Config, settings: StudySettings, config_text: str, factor: Fraction) -> list[str]:
    """Plan every run `factor` times as long, and set the finished runs back to the start of their decay.

    Returns messages, a line each. Raises UserError before any change if the extension is not valid.
    """
    directory = settings.results_dir / settings.name
    refuse_another_configuration(directory, config_text)
    if config.optimizer.schedule == "cosine":
        raise UserError(
            "a cosine schedule cannot be extended: it ended at its count, and another count has other learning rates "
            "from the first step; fix: choose a new CONFIG_STUDY_NAME with CONFIG_SCHEDULE_WSD=y or with a larger "
            "CONFIG_GPT2_MAX_TIME, _TOKENS or _ITERS"
        )
    plan = _existing_plan(directory)
    if plan.learning_rates:
        raise UserError(
            f"{settings.name} chose its learning rates at {plan.counts} iterations, and longer runs can need others; "
            "fix: choose a new CONFIG_STUDY_NAME with a larger budget"
        )
    noisy = [name for name in plan.variants if parse_arm(name).noise]
    if noisy:
        raise UserError(
            f"{noisy[0]} cannot be extended: the size of its noise depends on the planned iterations, so a longer run "
            "has another size before the decay; fix: choose a new CONFIG_STUDY_NAME with a larger budget"
        )
    with locked(directory):
        _refuse_interrupted(directory, plan)
        configured = [
            directory / "runs" / run_record.run_name(name, seed)
            for seed in range(settings.seeds)
            for name in settings.variants
        ]
        others = [folder for folder in _finished(directory) if folder not in configured]
        variants = [_variant_to_extend(folder, plan, config.optimizer) for folder in (*configured, *others)]
        longer = _longer(plan, config, factor)
        counts = [longer.variants[name].iterations for name in variants]
        require_space(directory, config.model, counts, config.optimizer.schedule)
        saved = directory / f"plan-{plan.largest_count}.json"
        files.write_bytes(saved, read_bytes(directory / plan_file.FILE))
        plan_file.write(directory, longer)  # from here on the study is extended
        _set_back_finished(directory, longer)
    names = ", ".join(folder.name for folder in others)
    changes = (
        f"{name} {row.iterations} -> {longer.variants[name].iterations}"
        for name, row in plan.variants.items()
    )
    return [
        *(
            [f"set back, but not continued by `make`, because .config does not name them: {names}"]
            if others
            else []
        ),
        f"{settings.name}: {len(variants)} runs are planned for {longer.extended:g} times the first budget; "
        f"iterations: {', '.join(changes)}",
        "`make` continues each run from the start of its decay. The shorter results are saved: run-N.json, "
        "checkpoint-N/, and plan-N.json of the study. `make extend UNDO=1` restores them.",
    ]


def finish_extension(directory: Path) -> None:
    """Complete an extension, or the undoing of one, that was interrupted."""
    if (directory / UNDO).exists():
        with locked(directory):
            _complete_undo(directory)
    plan = plan_file.read_valid(directory)  # a damaged one is reported by the code that needs it
    if plan and _behind(directory, plan):
        with locked(directory):
            _set_back_finished(directory, plan)


# ---- undo


def undo(settings: StudySettings) -> list[str]:
    """Restore the plan and the runs from before the last extension. Returns messages, a line each.

    Results beyond that length move to undone-M/, M the largest count of the plan that is undone.
    """
    directory = settings.results_dir / settings.name
    plan = _existing_plan(directory)
    with locked(directory):
        if not (directory / UNDO).exists():
            previous = saved_counts(directory, "plan")
            if not previous:
                raise UserError(f"{directory} has not been extended, so there is no extension to undo")
            into = files.unused(directory / f"undone-{plan.largest_count}")
            entries = Undo(f"plan-{previous[-1]}.json", into.name)
            files.write_json(
                directory / UNDO, entries.to_json()
            )  # from here on the extension is being undone
        into, restored = _complete_undo(directory)
    messages = [f"{settings.name}: the extension was undone; iterations: {restored.counts}"]
    if into.exists():
        messages.append(
            f"the longer results are in {into}; `make report STUDY={into}` shows those that are finished"
        )
    return messages


def _complete_undo(directory: Path) -> tuple[Path, Plan]:
    """Restore every run, then the plan. Each step can be interrupted and repeated."""
    try:
        entries = read_file(Undo, directory / UNDO)
    except DamagedFileError as error:
        raise UserError(
            f'{error}; fix: write {{"previous": "plan-N.json", "into": "undone-M"}} into it, N the count to restore, '
            "M the count to undo"
        ) from error
    into, previous = directory / entries.into, directory / entries.previous
    if previous.exists():
        plan = _existing_plan(directory, previous.name)
        for folder in sorted((directory / "runs").glob("*/")):
            _restore(folder, plan, into)
        if into.exists():
            for name in (plan_file.FILE, "config", "expected.json"):
                _copy(directory / name, into / name)
        previous.replace(directory / plan_file.FILE)
    (directory / UNDO).unlink()
    return into, _existing_plan(directory)


def _restore(folder: Path, plan: Plan, into: Path) -> None:
    """Restore the run to its length in `plan`; move its longer results to `into`."""
    record, counts = read_record(folder), saved_counts(folder, "run")
    row = plan.variants.get(record.variant) if record else None
    has_length = record and row and record.planned_iterations == row.iterations
    if record and has_length and (record.status == "finished" or not counts):
        return  # restored before, or never set back
    beyond = into / "runs" / folder.name
    if not counts:  # it was started after the extension
        beyond.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(beyond)
        return
    count = counts[-1]
    states = ["checkpoint", *(["stable"] if (folder / f"stable-{count}").exists() else [])]
    longer, shorter = (folder / "checkpoint").exists(), (folder / f"checkpoint-{count}").exists()
    recorded = (folder / "run.json").exists()  # it may be missing: a damaged one is moved away
    if (longer and (recorded or shorter)) or (recorded and beyond.exists()):
        beyond.mkdir(parents=True, exist_ok=True)
        _copy(folder / "config", beyond / "config")
        for path in (folder / name for name in (*states, *SAVED)):
            if os.path.lexists(path) and path.name != "config":
                path.rename(beyond / path.name)
    else:  # it has not continued beyond the shorter length
        if "stable" in states:
            shutil.rmtree(folder / "stable", ignore_errors=True)
        (folder / "run.json").unlink(missing_ok=True)
    for path in (folder / name for name in ("checkpoint", "stable", *SAVED)):
        saved = saved_name(path, count)
        if saved.exists():
            if path.exists() and path.is_dir() != saved.is_dir():  # damaged
                files.quarantine(path)
            saved.replace(path)


# ---- checks and plans


def _existing_plan(directory: Path, name: str = plan_file.FILE) -> Plan:
    plan = plan_file.read(directory, name)
    if plan is None:
        raise UserError(f"{directory} has not been run, so there is nothing to extend; fix: `make` first")
    return plan


def _refuse_interrupted(directory: Path, plan: Plan) -> None:
    """Raise UserError if an extension, or the undoing of one, is incomplete."""
    if (directory / UNDO).exists():
        raise UserError(
            f"undoing the last extension of {directory} was interrupted; fix: `make extend UNDO=1`"
        )
    behind = ", ".join(folder.name for folder in _behind(directory, plan))
    if behind:
        raise UserError(
            f"the last extension was interrupted before {behind}; fix: `make`, which completes it"
        )


def _finished(directory: Path) -> dict[Path, RunRecord]:
    """Return the records of the finished runs by folder."""
    records = read_records(directory)
    return {path: record for path, record in records.items() if record.status == "finished"}


def _variant_to_extend(folder: Path, plan: Plan, optimizer: OptimizerConfig) -> str:
    """Return the variant of a run. Raises UserError if the run is not equal to a longer run up to its decay."""
    try:
        record = run_record.load(folder)
    except run_record.RecordError as error:
        raise UserError(f"{error}; fix: `make`, then `make extend`") from error
    if record.status != "finished":
        raise UserError(
            f"{folder.name} is {record.status}; only finished runs are extended; fix: `make`, then `make extend`"
        )
    damage = disagreements(record, folder.joinpath)
    if damage:
        raise UserError(f"{folder} is damaged: {'; '.join(damage)}; {REMEDY}")
    row = plan.variants.get(record.variant)
    if row is None or record.planned_iterations != row.iterations:
        raise UserError(
            f"{folder.name} was planned with {record.planned_iterations} iterations, plan.json has "
            f"{row.iterations if row else 'none'}; fix: restore the run's plan, or choose a new CONFIG_STUDY_NAME"
        )
    if record.truncated:
        raise UserError(
            f"a time limit cut {folder.name} before its {row.iterations} iterations; fix: choose a new "
            "CONFIG_STUDY_NAME without CONFIG_GPT2_HARD_LIMIT"
        )
    start = decay_start(row.iterations, optimizer.decay_fraction, row.warmup_iterations or 0)
    fix = "fix: choose a new CONFIG_STUDY_NAME with a larger budget"
    found = [path for path in checkpoint.complete(folder / "stable") if path.name == f"{start:08d}"]
    if not found:
        raise UserError(
            f"{folder / 'stable'} has no checkpoint of iteration {start}, where the decay began; {fix}"
        )
    try:
        checkpoint.load(found[0])
    except checkpoint.CheckpointError as error:
        raise UserError(f"{folder.name} cannot continue: {error}; {fix}") from error
    return record.variant


def _longer(plan: Plan, config: Config, factor: Fraction) -> Plan:
    """Return the plan with `factor` times the counts, computed from the counts of the first budget."""
    total = Fraction(str(plan.extended or 1)) * factor
    rows = {name: extended_row(row, total) for name, row in plan.variants.items()}
    for name, row in rows.items():
        before = plan.variants[name].iterations
        if row.iterations <= before:
            raise UserError(
                f"FACTOR={float(factor):g} adds no iteration to the {before} of {name}; fix: a larger FACTOR"
            )
    limits = {name: Fraction(value) * total for name, value in dataclasses.asdict(config.budget).items()}
    whole = {name: int(limit) if limit.denominator == 1 else float(limit) for name, limit in limits.items()}
    longer = dataclasses.replace(
        plan,
        extended=float(total),
        variants=rows,
        budget=PlanBudget(**whole, equal_time=plan.budget.equal_time),
    )
    note = (
        f"extended to {float(total):g} times the first budget: each run continued from the start of its decay "
        f"(from {plan.counts} to {longer.counts} iterations), with the first budget's warm-up"
    )
    return dataclasses.replace(longer, notes=(*plan.notes, note))


# ---- the runs


def _behind(directory: Path, plan: Plan) -> dict[Path, RunRecord]:
    """Return the finished runs with fewer iterations than an extended plan has."""
    return {
        folder: record
        for folder, record in (_finished(directory) if plan.extended is not None else {}).items()
        if record.variant in plan.variants
        and 0 < (record.planned_iterations or 0) < plan.variants[record.variant].iterations
    }


def _set_back_finished(directory: Path, plan: Plan) -> None:
    for folder, record in _behind(directory, plan).items():
        _set_back(folder, record, record.planned_iterations or 0)


def _set_back(folder: Path, record: RunRecord, count: int) -> None:
    """Save the finished run under names with its count. Its next process begins at stable/.

    run.json has the status "finished" until the end, so that each step can be interrupted and repeated.
    """
    for path in (folder / name for name in SAVED):
        _copy(path, saved_name(path, count))
    for name in END_RESULTS:
        (folder / name).unlink(missing_ok=True)
    if (folder / "checkpoint").exists():
        (folder / "checkpoint").rename(folder / f"checkpoint-{count}")
    stable = folder / f"stable-{count}"
    if (folder / "stable").exists() and not stable.exists():
        temporary = folder / f".stable-{count}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(folder / "stable", temporary, copy_function=_link)
        temporary.rename(stable)
    note = f"finished at {count} iterations and extended; that record is run-{count}.json"
    behind = dataclasses.replace(record, status="interrupted", notes=(*record.notes, note))
    run_record.write(folder, behind)


def _copy(source: Path, target: Path) -> None:
    """Copy a file atomically if it exists. A folder or a FIFO in its place is not copied; the report names it."""
    with contextlib.suppress(FileNotFoundError, DamagedFileError):
        files.write_bytes(target, read_bytes(source, metrics_log.SIZE_LIMIT))


def _link(source: str, target: str) -> None:
    """Make a hard link, or a copy where the file system has no hard links. Files of a checkpoint never change."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
