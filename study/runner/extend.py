"""Longer runs: a study's finished runs go on from where their decay began, as if planned longer from the start.

Under "wsd" the rates of a run of N iterations are those of every longer run until N's decay begins, if the warm-up
has as many iterations; that state is kept in <run>/stable. Under a cosine there is no such state.

    plan.json       the new counts; `extended` times the first budget. Written at once: it decides
    plan-N.json     the plan before, N its largest count
    <run>/run-N.json, metrics-N.jsonl, ..., checkpoint-N/   what the run was at N iterations
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from gpt2.artifacts import checkpoint, run_record
from gpt2.config.config import Config, OptimizerConfig
from gpt2.system import files
from gpt2.system.errors import UserError
from gpt2.train.optimizer import decay_start
from study.runner import plan as planning
from study.runner import space
from study.runner.guard import locked, refuse_another_configuration
from study.runner.settings import StudySettings

DECIMAL = re.compile(r"[0-9]+(\.[0-9]+)?")
KEPT = ("run.json", "metrics.jsonl", "hellaswag.json", "validation_windows.json")
OF_THE_END = ("hellaswag.json", "validation_windows.json")  # a run that is not finished has none


class ExtendError(UserError, RuntimeError):
    """The runs cannot be made longer as they are."""


def parse_factor(text: str) -> Fraction:
    """FACTOR, exactly as it was written."""
    if not DECIMAL.fullmatch(text) or Fraction(text) <= 1:
        raise ExtendError(f"FACTOR={text} is no extension; right: a decimal above 1, such as FACTOR=2")
    return Fraction(text)


def extend(config: Config, settings: StudySettings, config_text: str, factor: Fraction) -> list[str]:
    """Plan every run of the study `factor` times as long and set the finished ones back to where they go on.

    Returns what was done, a line each. ExtendError, before anything is changed, where it would not be legitimate.
    """
    directory = settings.results_dir / settings.name
    refuse_another_configuration(directory, config_text)
    _refuse_cosine(config.optimizer)
    plan = planning.load_plan(directory)
    if plan is None:
        raise ExtendError(f"{directory} has not been run, so there is nothing to extend; right: `make` first")
    with locked(directory):
        pending = _behind(directory, plan)
        if pending:
            names = ", ".join(path.name for path in pending)
            raise ExtendError(
                f"the last extension was cut off before {names}; right: `make`, which completes it"
            )
        runs = _runs(directory, settings)
        before = {name: row["iterations"] for name, row in plan["variants"].items()}
        for folder in runs:
            _refuse_run(folder, plan, config.optimizer)
        longer = _longer(plan, config, factor)
        counts = [longer["variants"][run_record.load(folder)["variant"]]["iterations"] for folder in runs]
        space.require(directory, config.model, counts, config.optimizer.schedule)
        kept = directory / f"plan-{max(before.values())}.json"
        files.write_text(kept, (directory / "plan.json").read_text(encoding="utf-8"))
        files.write_json(directory / "plan.json", longer)  # from here on it is extended
        for folder in _behind(directory, longer):
            _set_back(folder)
    return _told(directory, settings, runs, before, longer)


def finish_extension(directory: Path) -> None:
    """Set back the runs that an extension was cut off before, if any."""
    try:
        plan = planning.load_plan(directory)
    except planning.PlanError:  # told by whoever needs the plan
        return
    if plan and _behind(directory, plan):
        with locked(directory):
            for folder in _behind(directory, plan):
                _set_back(folder)


def _refuse_cosine(optimizer: OptimizerConfig) -> None:
    if optimizer.schedule == "cosine":
        raise ExtendError(
            "a cosine cannot be extended: the schedule ended at its count, and another count has other rates from "
            "the first step; right: a new CONFIG_STUDY_NAME with CONFIG_SCHEDULE_WSD=y or with a larger "
            "CONFIG_GPT2_MAX_TIME, _TOKENS or _ITERS"
        )


def _told(
    directory: Path, settings: StudySettings, runs: list[Path], before: dict[str, int], longer: dict[str, Any]
) -> list[str]:
    """What an extension has done, in lines for the terminal."""
    rows = longer["variants"]
    changes = ", ".join(f"{name} {before[name]} -> {rows[name]['iterations']}" for name in before)
    asked = _asked(directory, settings)
    others = ", ".join(folder.name for folder in runs if folder not in asked)
    aside = [f"not in .config, so set back with the others but not gone on with: {others}"] if others else []
    return [
        *aside,
        f"{settings.name}: {len(runs)} runs are planned for {longer['extended']:g} times the first budget; "
        f"iterations: {changes}",
        "`make` goes on with each from where its decay began; what they were is kept beside them: run-N.json, "
        "checkpoint-N/, and plan-N.json for the study",
    ]


def _asked(directory: Path, settings: StudySettings) -> list[Path]:
    """The folders of the runs that .config asks for."""
    return [
        directory / "runs" / run_record.run_name(name, seed)
        for seed in range(settings.seeds)
        for name in settings.variants
    ]


def _runs(directory: Path, settings: StudySettings) -> list[Path]:
    """The folders of the runs that .config asks for and of all others that are finished."""
    asked = _asked(directory, settings)
    return [*asked, *(path for path in _finished(directory) if path not in asked)]


def _finished(directory: Path) -> dict[Path, dict[str, Any]]:
    """Records of the finished runs, by folder."""
    seen = {path: _record(path) for path in sorted((directory / "runs").glob("*/"))}
    return {path: value for path, value in seen.items() if value and value["status"] == "finished"}


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        return run_record.load(folder)
    except run_record.RecordError:
        return None


def _refuse_run(folder: Path, plan: dict[str, Any], optimizer: OptimizerConfig) -> None:
    """ExtendError where the run in `folder` is not what a longer one would be up to its decay."""
    seen = _record(folder)
    status = seen["status"] if seen else "missing"
    if not seen or status != "finished":
        raise ExtendError(
            f"{folder.name} is {status}; right: finished runs alone are extended, so `make` first, then "
            "`make extend`"
        )
    row = plan["variants"].get(seen["variant"])
    schedule = seen["schedule"] or {}
    if row is None or schedule.get("iterations") != row["iterations"]:
        raise ExtendError(
            f"{folder.name} was planned with {schedule.get('iterations')} iterations, plan.json has "
            f"{row['iterations'] if row else 'none'}; right: the plan that it was run with, or a new CONFIG_STUDY_NAME"
        )
    if schedule["cut"]:
        raise ExtendError(
            f"the schedule of {folder.name} was cut at iteration {seen['progress']['iterations']} of "
            f"{row['iterations']} by the time limit; right: a new CONFIG_STUDY_NAME, "
            "planned at the card's speed of today"
        )
    _refuse_stable(folder, decay_start(row["iterations"], optimizer.decay_fraction, row["warmup_iterations"]))


def _refuse_stable(folder: Path, iteration: int) -> None:
    """ExtendError where the checkpoint of the beginning of the decay is not there, whole and of that iteration."""
    right = "a new CONFIG_STUDY_NAME with a larger budget"
    found = [path for path in checkpoint.complete(folder / "stable") if path.name == f"{iteration:08d}"]
    if not found:
        raise ExtendError(
            f"{folder / 'stable'} has no checkpoint of iteration {iteration}, where the decay began; right: {right}"
        )
    try:
        checkpoint.load(found[0])
    except checkpoint.CheckpointError as error:
        raise ExtendError(f"{folder.name} cannot go on: {error}; right: {right}") from error


def _longer(plan: dict[str, Any], config: Config, factor: Fraction) -> dict[str, Any]:
    """The plan with `factor` times the counts; counts are always worked out from the first budget's."""
    total = Fraction(str(plan.get("extended", 1))) * factor
    rows = {name: dict(row) for name, row in plan["variants"].items()}
    for name, row in rows.items():
        before = row["iterations"]
        planning.extend_row(row, total)
        if row["iterations"] <= before:
            raise ExtendError(
                f"FACTOR={float(factor):g} adds no iteration to {name}'s {before}; right: a larger one"
            )
    tokens = max(row["tokens"] for row in rows.values())
    budget = {
        name: float(value * total) if (value * total) % 1 else int(value * total)
        for name in ("max_time_seconds", "max_tokens", "max_iterations")
        for value in [getattr(config.budget, name)]
    }
    note = (
        f"extended to {float(total):g} times the first budget: each run went on from where its decay began "
        f"(from {_listed(plan['variants'])} to {_listed(rows)} iterations), with the first budget's warm-up"
    )
    return plan | {
        "extended": float(total),
        "variants": rows,
        "budget": plan["budget"] | budget,
        "evaluation": plan["evaluation"]
        | {"grid_tokens": planning.grid(plan["evaluation"]["interval_tokens"], tokens)},
        "notes": [*plan["notes"], note],
    }


def _listed(rows: dict[str, Any]) -> str:
    return ", ".join(str(count) for count in dict.fromkeys(row["iterations"] for row in rows.values()))


def _behind(directory: Path, plan: dict[str, Any]) -> list[Path]:
    """The folders of the runs that are finished at a count from before the plan was extended."""
    if "extended" not in plan:
        return []
    return [
        folder
        for folder, seen in _finished(directory).items()
        if seen["variant"] in plan["variants"]
        and seen["schedule"]
        and seen["schedule"]["iterations"] < plan["variants"][seen["variant"]]["iterations"]
    ]


def _set_back(folder: Path) -> None:
    """Keep what the finished run was under names of its own; its next process then begins at stable/.

    run.json says "finished" until all else is done, so that this can be cut off anywhere and begun again.
    """
    seen = run_record.load(folder)
    count = seen["schedule"]["iterations"]
    for path in (folder / name for name in KEPT):
        if path.exists():
            files.write_text(
                path.with_name(f"{path.stem}-{count}{path.suffix}"), path.read_text(encoding="utf-8")
            )
    for name in OF_THE_END:
        (folder / name).unlink(missing_ok=True)
    if (folder / "checkpoint").exists():
        (folder / "checkpoint").rename(folder / f"checkpoint-{count}")
    note = f"finished at {count} iterations and extended; that record is run-{count}.json"
    files.write_json(folder / "run.json", seen | {"status": "interrupted", "notes": [*seen["notes"], note]})
