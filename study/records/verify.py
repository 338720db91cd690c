"""Verify a study's folder: plan, attention maps, records, side files and checkpoints. Needs no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpt2.artifacts import checkpoint, eval_sets, run_record
from gpt2.artifacts.seal import read_sealed
from gpt2.system.errors import UserError
from study.records import plan_file
from study.records.integrity import disagreements
from study.records.lengths import saved_counts, saved_name


@dataclass(frozen=True)
class Verified:
    """A file of the study or a run: what was checked, and a message for everything that does not agree."""

    name: str
    checked: list[str]
    problems: list[str]

    @property
    def text(self) -> str:
        """One line."""
        checked = f" ({', '.join(self.checked)})" if self.checked else ""
        return f"{self.name}: {'; '.join(self.problems) or f'agrees{checked}'}"


def verify_study(study_dir: Path) -> list[Verified]:
    """Verify the study's own files, then every run."""
    saved = [f"plan-{count}.json" for count in saved_counts(study_dir, "plan")]
    rows = [Verified(name, [], _plan_problems(study_dir, name)) for name in (plan_file.FILE, *saved)]
    if (study_dir / "attention.json").exists():
        rows.append(
            Verified(
                "attention.json", [], _errors(functools.partial(read_sealed, study_dir / "attention.json"))
            )
        )
    return [*rows, *(_verify_run(folder) for folder in sorted((study_dir / "runs").glob("*/")))]


def _plan_problems(study_dir: Path, name: str) -> list[str]:
    try:
        return [] if plan_file.read(study_dir, name) else [f"{study_dir / name} does not exist"]
    except plan_file.PlanFileError as error:
        return [str(error)]


def _verify_run(folder: Path) -> Verified:
    """Verify the record, also those of shorter lengths, with the files that belong to it, and the checkpoints."""
    checked, problems = [], []
    for count in (None, *saved_counts(folder, "run")):
        name = "run.json" if count is None else f"run-{count}.json"
        try:
            record = run_record.load(folder, name)
        except run_record.RecordError as error:
            problems.append(str(error))
            continue
        file = functools.partial(_file, folder, count)
        beside = [file(part).name for part in run_record.SIDE_FILES if file(part).exists()]
        checked += [f"{name} ({record.status}, {'sealed' if record.seal else 'unsealed'})", *beside]
        problems += disagreements(record, file, full=True)
    saved = [eval_sets.FILE, *(path.name for path in folder.glob("eval_sets-*.json"))]
    for name in ("memory.json", "attention.json", "lm_eval.json", *saved):
        if (folder / name).exists():
            checked.append(name)
            problems += _errors(functools.partial(read_sealed, folder / name))
    states = [path for kind in run_record.CHECKPOINTS for path in sorted(folder.glob(f"{kind}*/"))]
    found = [path for state in states for path in checkpoint.complete(state)]
    for path in found:
        problems += _errors(functools.partial(checkpoint.verify, path))
    checked += [f"{path.parent.name}/{path.name}" for path in found]
    return Verified(folder.name, checked, problems)


def _file(folder: Path, count: int | None, name: str) -> Path:
    return folder / name if count is None else saved_name(folder / name, count)


def _errors(work: Callable[[], object]) -> list[str]:
    try:
        work()
    except UserError as error:
        return [str(error)]
    return []
