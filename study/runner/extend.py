"""Extend finished runs, and undo an extension.

Under "wsd" the learning rates of a run of N iterations are those of every longer run until N's decay begins, if the
warm-up has as many iterations. That state is saved in <run>/stable. Under a cosine there is no such state.

    plan.json       the new counts; `extended` times the first budget. Written first: it decides the length
    plan-N.json     the plan before; N is its largest count
    <run>/run-N.json, metrics-N.jsonl, ..., checkpoint-N/, stable-N/   results and states of the run at N iterations
    undo.json       exists while an extension is being undone
    undone-M/       plan and runs of M iterations that were undone: a study folder for reports
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from gpt2.artifacts import checkpoint, run_record
from gpt2.config.config import Config, OptimizerConfig
from gpt2.system import files
from gpt2.system.errors import UserError
from gpt2.train.optimizer import decay_start
from study.records import plan_file
from study.records.integrity import REMEDY, disagreements
from study.records.lengths import saved_counts, saved_name
from study.records.plan_file import Plan, PlanRow
from study.runner.plan import extended_row
from study.runner.preconditions import locked, refuse_another_configuration, require_space
from study.runner.settings import StudySettings

DECIMAL = re.compile(r"[0-9]+(\.[0-9]+)?")
SAVED = (*run_record.SIDE_FILES, "run.json")  # run.json last: it marks the end
END_RESULTS = ("hellaswag.json", "validation_windows.json")  # only a finished run has them
UNDO = "undo.json"  # {"previous": the plan file to restore, "into": the folder for the longer results}


class ExtendError(UserError, RuntimeError):
    """The runs cannot be extended, or the extension cannot be undone."""


def parse_factor(text: str) -> Fraction:
    """Read FACTOR as an exact fraction."""
    if not DECIMAL.fullmatch(text) or Fraction(text) <= 1:
        raise ExtendError(f"FACTOR={text} does not extend a run; fix: a decimal above 1, such as FACTOR=2")
    return Fraction(text)


def extend(config: Config, settings: StudySettings, config_text: str, factor: Fraction) -> list[str]:
    """Plan every run `factor` times as long, and set the finished runs back to the start of their decay.

    Returns messages, a line each. ExtendError before any change if an extension is not valid.
    """
    directory = settings.results_dir / settings.name
    refuse_another_configuration(directory, config_text)
    _refuse_cosine(config.optimizer)
    plan = _existing_plan(directory)
    with locked(directory):
        if (directory / UNDO).exists():
            raise ExtendError(
                f"undoing the last extension of {directory} was interrupted; fix: `make extend UNDO=1`"
            )
        pending = _behind(directory, plan)
        if pending:
            names = ", ".join(path.name for path in pending)
            raise ExtendError(
                f"the last extension was interrupted before {names}; fix: `make`, which completes it"
            )
        runs = _runs(directory, settings)
        before = {name: row.iterations for name, row in plan.variants.items()}
        for folder in runs:
            _refuse_run(folder, plan, config.optimizer)
        longer = _longer(plan, config, factor)
        counts = [longer.variants[run_record.load(folder).variant].iterations for folder in runs]
        require_space(directory, config.model, counts, config.optimizer.schedule)
        saved = directory / f"plan-{max(before.values())}.json"
        files.write_text(saved, (directory / "plan.json").read_text(encoding="utf-8"))
        plan_file.write(directory, longer)  # from here on the study is extended
        for folder in _behind(directory, longer):
            _set_back(folder)
    return _extended_messages(directory, settings, runs, before, longer)


def finish_extension(directory: Path) -> None:
    """Complete an extension, or the undoing of one, that was interrupted."""
    if (directory / UNDO).exists():
        with locked(directory):
            _complete_undo(directory)
    try:
        plan = plan_file.read(directory)
    except plan_file.PlanFileError:  # reported by the code that needs the plan
        return
    if plan and _behind(directory, plan):
        with locked(directory):
            for folder in _behind(directory, plan):
                _set_back(folder)


# ---- undo


def undo(settings: StudySettings) -> list[str]:
    """Restore the plan and the runs of before the last extension. Returns messages, a line each.

    Results beyond that length move to undone-M/, M the largest count of the plan that is undone.
    """
    directory = settings.results_dir / settings.name
    plan = _existing_plan(directory)
    with locked(directory):
        if not (directory / UNDO).exists():
            previous = saved_counts(directory, "plan")
            if not previous:
                raise ExtendError(f"{directory} has not been extended, so there is no extension to undo")
            count = max(row.iterations for row in plan.variants.values())
            into = _unused(directory / f"undone-{count}")
            entries = {"previous": f"plan-{previous[-1]}.json", "into": into.name}
            files.write_json(directory / UNDO, entries)  # from here on the extension is being undone
        into, restored = _complete_undo(directory)
    messages = [f"{settings.name}: the extension was undone; iterations: {_counts(restored.variants)}"]
    if into.exists():
        messages.append(
            f"the longer results are in {into}; `make report STUDY={into}` shows those that are finished"
        )
    return messages


def _complete_undo(directory: Path) -> tuple[Path, Plan]:
    """Restore every run, then the plan. Each step can be interrupted and repeated."""
    entries = json.loads((directory / UNDO).read_text(encoding="utf-8"))
    into, previous = directory / entries["into"], directory / entries["previous"]
    if previous.exists():
        plan = _existing_plan(directory, previous.name)
        for folder in sorted((directory / "runs").glob("*/")):
            _restore(folder, plan, into)
        if into.exists():
            for name in ("plan.json", "config", "expected.json"):
                if (directory / name).exists():
                    shutil.copyfile(directory / name, into / name)
        previous.replace(directory / "plan.json")
    (directory / UNDO).unlink()
    return into, _existing_plan(directory)


def _restore(folder: Path, plan: Plan, into: Path) -> None:
    """Restore the run to its length in `plan`; move what it has beyond that length to `into`."""
    record, counts = _record(folder), saved_counts(folder, "run")
    row = plan.variants.get(record.variant) if record else None
    if (
        record
        and row
        and record.schedule
        and record.schedule.iterations == row.iterations
        and (record.status == "finished" or not counts)
    ):
        return  # restored already, or not yet set back
    beyond = into / "runs" / folder.name
    if not counts:  # it was started after the extension
        beyond.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(beyond)
        return
    count = counts[-1]
    saved_stable = (folder / f"stable-{count}").exists()
    if (folder / "run.json").exists() and ((folder / "checkpoint").exists() or beyond.exists()):
        beyond.mkdir(parents=True, exist_ok=True)
        if (folder / "config").exists():
            shutil.copyfile(folder / "config", beyond / "config")
        states = ["checkpoint", *(["stable"] if saved_stable else [])]
        for path in (folder / name for name in [*states, *SAVED]):
            if path.exists() and path.name != "config":
                path.rename(beyond / path.name)
    elif (folder / "run.json").exists():  # it has not continued beyond the shorter length
        if saved_stable:
            shutil.rmtree(folder / "stable", ignore_errors=True)
        (folder / "run.json").unlink()
    for name in ("checkpoint", "stable", *SAVED):
        saved = saved_name(folder / name, count)
        if saved.exists():
            saved.replace(folder / name)
    (folder / "run.json").touch()  # the report of the longer runs is older than it


def _unused(path: Path) -> Path:
    """The path, or path.2, path.3, ...: the first that does not exist."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


# ---- checks and plans


def _existing_plan(directory: Path, name: str = plan_file.FILE) -> Plan:
    plan = plan_file.read(directory, name)
    if plan is None:
        raise ExtendError(f"{directory} has not been run, so there is nothing to extend; fix: `make` first")
    return plan


def _refuse_cosine(optimizer: OptimizerConfig) -> None:
    if optimizer.schedule == "cosine":
        raise ExtendError(
            "a cosine schedule cannot be extended: it ended at its count, and another count has other learning rates "
            "from the first step; fix: choose a new CONFIG_STUDY_NAME with CONFIG_SCHEDULE_WSD=y or with a larger "
            "CONFIG_GPT2_MAX_TIME, _TOKENS or _ITERS"
        )


def _extended_messages(
    directory: Path, settings: StudySettings, runs: list[Path], before: dict[str, int], longer: Plan
) -> list[str]:
    """Messages after an extension, a line each."""
    changes = ", ".join(
        f"{name} {count} -> {longer.variants[name].iterations}" for name, count in before.items()
    )
    asked = _asked(directory, settings)
    others = ", ".join(folder.name for folder in runs if folder not in asked)
    aside = (
        [f"set back but not continued by `make`, because .config does not ask for them: {others}"]
        if others
        else []
    )
    return [
        *aside,
        f"{settings.name}: {len(runs)} runs are planned for {longer.extended:g} times the first budget; "
        f"iterations: {changes}",
        "`make` continues each run from the start of its decay. The shorter results are saved: run-N.json, "
        "checkpoint-N/, and plan-N.json of the study. `make extend UNDO=1` restores them.",
    ]


def _asked(directory: Path, settings: StudySettings) -> list[Path]:
    """Folders of the runs that .config asks for."""
    return [
        directory / "runs" / run_record.run_name(name, seed)
        for seed in range(settings.seeds)
        for name in settings.variants
    ]


def _runs(directory: Path, settings: StudySettings) -> list[Path]:
    """Folders of the runs that .config asks for, and of all other finished runs."""
    asked = _asked(directory, settings)
    return [*asked, *(path for path in _finished(directory) if path not in asked)]


def _finished(directory: Path) -> dict[Path, run_record.RunRecord]:
    """Records of the finished runs, by folder."""
    found = {path: _record(path) for path in sorted((directory / "runs").glob("*/"))}
    return {path: value for path, value in found.items() if value and value.status == "finished"}


def _record(folder: Path) -> run_record.RunRecord | None:
    try:
        return run_record.load(folder)
    except run_record.RecordError:
        return None


def _refuse_run(folder: Path, plan: Plan, optimizer: OptimizerConfig) -> None:
    """ExtendError if the run is not equal to a longer run up to the decay."""
    try:
        record = run_record.load(folder)
    except run_record.RecordError as error:
        raise ExtendError(f"{error}; fix: `make`, then `make extend`") from error
    if record.status != "finished":
        raise ExtendError(
            f"{folder.name} is {record.status}; only finished runs are extended; fix: `make`, then `make extend`"
        )
    damage = disagreements(record, folder.joinpath)
    if damage:
        raise ExtendError(f"{folder} is damaged: {'; '.join(damage)}; {REMEDY}")
    row = plan.variants.get(record.variant)
    planned = record.schedule.iterations if record.schedule else None
    if row is None or planned != row.iterations:
        raise ExtendError(
            f"{folder.name} was planned with {planned} iterations, plan.json has "
            f"{row.iterations if row else 'none'}; fix: restore the run's plan, or choose a new CONFIG_STUDY_NAME"
        )
    if record.truncated:
        raise ExtendError(
            f"a time limit cut {folder.name} before its {row.iterations} iterations; fix: choose a new "
            "CONFIG_STUDY_NAME without CONFIG_GPT2_HARD_LIMIT"
        )
    _refuse_stable(folder, decay_start(row.iterations, optimizer.decay_fraction, row.warmup_iterations or 0))


def _refuse_stable(folder: Path, iteration: int) -> None:
    """ExtendError if there is no valid checkpoint of `iteration`, the start of the decay."""
    fix = "choose a new CONFIG_STUDY_NAME with a larger budget"
    found = [path for path in checkpoint.complete(folder / "stable") if path.name == f"{iteration:08d}"]
    if not found:
        raise ExtendError(
            f"{folder / 'stable'} has no checkpoint of iteration {iteration}, where the decay began; fix: {fix}"
        )
    try:
        checkpoint.load(found[0])
    except checkpoint.CheckpointError as error:
        raise ExtendError(f"{folder.name} cannot continue: {error}; fix: {fix}") from error


def _longer(plan: Plan, config: Config, factor: Fraction) -> Plan:
    """The plan with `factor` times the counts, computed from the counts of the first budget."""
    total = Fraction(str(plan.extended or 1)) * factor
    rows = {name: extended_row(row, total) for name, row in plan.variants.items()}
    for name, row in rows.items():
        before = plan.variants[name].iterations
        if row.iterations <= before:
            raise ExtendError(
                f"FACTOR={float(factor):g} adds no iteration to the {before} of {name}; fix: a larger FACTOR"
            )
    budget: dict[str, Any] = {
        name: float(value * total) if (value * total) % 1 else int(value * total)
        for name, value in dataclasses.asdict(config.budget).items()
    }
    note = (
        f"extended to {float(total):g} times the first budget: each run continued from the start of its decay "
        f"(from {_counts(plan.variants)} to {_counts(rows)} iterations), with the first budget's warm-up"
    )
    return dataclasses.replace(
        plan,
        extended=float(total),
        variants=rows,
        budget=dataclasses.replace(plan.budget, **budget),
        notes=(*plan.notes, note),
    )


def _counts(rows: Mapping[str, PlanRow]) -> str:
    return ", ".join(str(count) for count in dict.fromkeys(row.iterations for row in rows.values()))


def _behind(directory: Path, plan: Plan) -> list[Path]:
    """Folders of the runs that are finished at a count of before the extension."""
    if plan.extended is None:
        return []
    return [
        folder
        for folder, record in _finished(directory).items()
        if record.variant in plan.variants
        and record.schedule
        and record.schedule.iterations < plan.variants[record.variant].iterations
    ]


def _set_back(folder: Path) -> None:
    """Save the finished run under names with its count. Its next process begins at stable/.

    run.json says "finished" until the end, so that each step can be interrupted and repeated.
    """
    record = run_record.load(folder)
    assert record.schedule  # _behind read it
    count = record.schedule.iterations
    for path in (folder / name for name in SAVED):
        if path.exists():
            files.write_bytes(saved_name(path, count), path.read_bytes())
    for name in END_RESULTS:
        (folder / name).unlink(missing_ok=True)
    if (folder / "checkpoint").exists():
        (folder / "checkpoint").rename(folder / f"checkpoint-{count}")
    _link_tree(folder / "stable", folder / f"stable-{count}")
    note = f"finished at {count} iterations and extended; that record is run-{count}.json"
    behind = dataclasses.replace(record, status="interrupted", notes=(*record.notes, note))
    run_record.write(folder, behind)


def _link_tree(source: Path, target: Path) -> None:
    """Copy a folder whose files are never changed by hard links, where the file system has them."""
    if source.exists() and not target.exists():
        temporary = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(source, temporary, copy_function=_link)
        temporary.rename(target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
