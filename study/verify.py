"""Verify a study's folder: plan, records, side files and checkpoints. Needs no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime import checkpoint, records, run_record
from runtime.errors import UserError
from study import plan_file
from study.executors.executor import EXIT_FILE
from study.runs import run_folders
from study.tuned_rates import FILE, FOLDER

STUDY_FILES = ("expected.json", f"{FOLDER}/{FILE}")


@dataclass(frozen=True)
class Verified:
    """A file of the study or a run: what was checked, and a message for everything that does not agree."""

    name: str
    checked: list[str]
    problems: list[str]
    state: str = "agrees"

    @property
    def text(self) -> str:
        """One line."""
        checked = f" ({', '.join(self.checked)})" if self.checked else ""
        return f"{self.name}: {'; '.join(self.problems) or f'{self.state}{checked}'}"


def verify_study(study_dir: Path) -> list[Verified]:
    """Verify the study's own files, then every run."""
    rows = [Verified(plan_file.FILE, [], _plan_problems(study_dir))]
    for name in STUDY_FILES:
        if (study_dir / name).exists():
            rows.append(Verified(name, [], _errors(functools.partial(records.read_plain, study_dir / name))))
    runs, others = run_folders(study_dir)
    rows += [Verified(name, [], [], "not a run of this study: skipped") for name in others]
    return [*rows, *(_verify_run(folder) for folder in runs)]


def _plan_problems(study_dir: Path) -> list[str]:
    try:
        plan = plan_file.read(study_dir)
    except plan_file.PlanFileError as error:
        return [str(error)]
    if plan is None:
        return [f"{study_dir / plan_file.FILE} does not exist"]
    return [plan_file.ALTERED] if plan.design and plan.design.altered else []


def _verify_run(folder: Path) -> Verified:
    """Verify the record, the files that belong to it, and the checkpoints."""
    checked: list[str] = []
    problems: list[str] = []
    of = None
    try:
        record = run_record.load(folder)
    except run_record.RecordError as error:
        problems.append(str(error))
    else:
        of = run_record.owner(record)
        checked.append(f"run.json ({record.status})")
        if record.status == "finished":
            checked += dict.fromkeys(name.partition("/")[0] for name in run_record.side_files(folder))
            problems += run_record.altered(record, folder)
        for path in sorted((folder / run_record.EVALUATIONS).glob("*/")):
            checked.append(f"{run_record.EVALUATIONS}/{path.name}")
            problems += [f"{checked[-1]}: {text}" for text in run_record.check(path, record)]
    for path in sorted(folder.glob("*.json")):
        name = path.name
        if path.name not in ("run.json", EXIT_FILE) and name not in checked:
            checked.append(name)
            problems += _errors(functools.partial(records.read_plain, path, of))
    found = [path for kind in run_record.CHECKPOINTS for path in checkpoint.complete(folder / kind)]
    for path in found:
        problems += _errors(functools.partial(checkpoint.verify, path))
    checked += [f"{path.parent.name}/{path.name}" for path in found]
    return Verified(folder.name, checked, problems)


def _errors(work: Callable[[], object]) -> list[str]:
    try:
        work()
    except UserError as error:
        return [str(error)]
    return []
