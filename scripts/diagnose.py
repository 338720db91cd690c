"""`make diagnose RUNS="results/a/runs/B0 results/b/runs/B0"`: why do two runs differ? The first is the benchmark.

python -m scripts.diagnose RUN_DIR RUN_DIR [--out FOLDER]. A file of losses of another trainer may take a run's place.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from referee.numerics.diagnose.diagnosis import report
from referee.numerics.diagnose.pair import EPSILON, pair_curves
from referee.numerics.diagnose.symptoms import NOT_REPRODUCIBLE, Diagnosis, Score, diagnose, step_to_record
from referee.numerics.monitor.tables import rank_folders
from referee.numerics.rows import TableRow
from referee.numerics.setup.checklist_rows import EQUAL, FATAL, SUSPECT, ChecklistRow, worst_first
from referee.numerics.trend.trend import record_command
from referee.verdict.loss_files import LossCurve, read_curve, same_file
from runtime import run_record
from runtime.errors import UserError, run_command
from runtime.run_record import RunRecord
from scripts.record import result_folder
from study.compare import study_checklist as checklist_rows
from study.compare.loaded_studies import labels, read_settings
from study.compare.study_checklist import checklist
from study.hellaswag_scores import TASKS, entry, scored_items
from study.make_arguments import command_arguments
from study.runs import FinishedRecord, Run

USAGE = 'fix: make diagnose RUNS="results/a/runs/B0 results/b/runs/B0"'
REQUIRED = ("fingerprint", "target", "batch", "progress", "environment")  # parts of run.json for a checklist
# Rows that may differ between two runs of one machine with the same settings: they change no training step.
ASIDE = (
    "commit",
    "uncommitted changes",
    *(f"{task.name} items" for task in TASKS),
    "variants",
    "seeds",
)
ASIDE_REASONS = (checklist_rows.ASIDE, checklist_rows.BUDGET)


@dataclass
class RunSide:
    """One run. record: None for a file of losses. It is one side of a checklist, with itself as the only run."""

    path: Path
    label: str
    curve: LossCurve
    record: RunRecord | None = None

    @property
    def used(self) -> Sequence[Run]:
        record = cast("FinishedRecord", self.record)
        if record.schedule:  # the plans are compared, also of a run that ended before
            progress = dataclasses.replace(record.progress, iterations=record.schedule.iterations)
            record = dataclasses.replace(record, progress=progress)
        return [Run(record.run, record.variant, record.seed, record.status, True, record=record)]

    @property
    def variants(self) -> Sequence[str]:
        return [run.variant for run in self.used]

    @property
    def seeds(self) -> set[int]:
        return {run.seed for run in self.used if run.seed is not None}

    @property
    def configs(self) -> dict[str, dict[str, str] | None]:
        return {run.name: read_settings(self.path) for run in self.used}

    @property
    def epsilon(self) -> float:
        dtype = self.record.target.dtype if self.record and self.record.target else "float32"
        return EPSILON.get(dtype, EPSILON["float32"])

    def record_folder(self, step: int) -> Path:
        """Return the folder of that record."""
        records = result_folder(self.path, "records") if self.record else self.path.with_suffix(".records")
        return records / f"step{step}"


def read_runs(paths: Sequence[Path]) -> list[RunSide]:
    """Read two run folders or files of losses. UserError and NumericsError name what cannot be used."""
    if len(paths) != 2:
        raise UserError(f"RUNS names {len(paths)} runs, two are needed; {USAGE}")
    if same_file(*paths):
        raise UserError(f"{paths[0]} is named twice; {USAGE}")
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist; {USAGE}")
        if (path / "runs").is_dir():
            raise UserError(f"{path} is a study; fix: name one of its runs, such as {path / 'runs/B0'}")
    return [read_run(path, label) for path, label in zip(paths, labels(paths), strict=True)]


def read_with(path: Path, against: Path | None) -> tuple[RunSide, RunSide | None]:
    """Read a run, and the one that it is compared with."""
    if against is None:
        return read_run(path, path.name), None
    first, second = labels((path, against))
    return read_run(path, first), read_run(against, second)


def read_run(path: Path, label: str) -> RunSide:
    if not (path / "run.json").exists():
        return RunSide(path, label, read_curve(path, label))
    record = run_record.load_given(path)
    failed = {fault.iteration + 1: math.nan for fault in record.faults}
    if (path / "metrics.jsonl").exists() and (path / "metrics.jsonl").stat().st_size:
        curve = read_curve(path, label)
    elif failed:
        curve = LossCurve(label, {})
    else:
        raise UserError(f"{path} has no metrics.jsonl, so it has no losses; {USAGE}")
    # the step that is not finite ends the process before it is logged
    curve.losses = dict(sorted((failed | curve.losses).items()))
    return RunSide(path, label, curve, record)


def run_checks(sides: Sequence[RunSide]) -> list[ChecklistRow] | None:
    """Return the checklist, or None where a run has not recorded what it needs."""
    recorded = all(getattr(side.record, name, None) is not None for side in sides for name in REQUIRED)
    return checklist(sides) if recorded else None


def same_settings(checks: Sequence[ChecklistRow] | None) -> bool:
    """Whether the checklist shows one kind of machine and the same settings."""
    return checks is not None and all(
        check.status == EQUAL or check.subject in ASIDE or check.reason in ASIDE_REASONS for check in checks
    )


def run_scores(sides: Sequence[RunSide]) -> list[Score]:
    """Return the accuracies and the standard error of their difference, of the tasks whose items both runs have."""
    records = [side.record for side in sides if side.record]
    found = []
    for task in TASKS if len(records) == 2 else ():
        items = [scored_items(record, task) for record in records]
        scores = [entry(record, task) for record in records]
        values = [score.acc_norm for score in scores if score and isinstance(score.acc_norm, float)]
        errors = [
            score.acc_norm_stderr for score in scores if score and isinstance(score.acc_norm_stderr, float)
        ]
        if items[0] and items[0] == items[1] and len(values) == 2:
            error = math.hypot(*errors) if len(errors) == 2 else None
            found.append(Score(task.name, values[0], values[1], error))
    return found


def status_notes(sides: Sequence[RunSide]) -> list[str]:
    """Return notes on runs that are not finished."""
    return [
        f"{side.label} is {side.record.status}{f': {side.record.error}' if side.record.error else ''}"
        for side in sides
        if side.record and side.record.status != "finished"
    ]


# Groups of the checklist. Where a fatal row of them differs, records of one step have other inputs or weights.
BLOCKING = ("study", "data", "model", "batch", "schedule", "hyper-parameters")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.diagnose")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(command_arguments(("OUT",), paths="RUNS"))
    return diagnose_runs(read_runs(arguments.runs), arguments.out)


def diagnose_runs(runs: Sequence[RunSide], out: Path | None) -> int:
    folder = out or default_folder("diagnose", [run.path for run in runs])
    refuse_results(folder)
    pair = pair_curves(runs[0].curve, runs[1].curve, None, max(run.epsilon for run in runs))
    checks = run_checks(runs)
    diagnosis = diagnose(pair, same_settings(checks), run_scores(runs))
    diagnosis.notes.extend(status_notes(runs))
    if checks is None:
        diagnosis.notes.append("no checklist: a side has no complete run.json")
    rows = [checklist_row(check) for check in worst_first(checks or []) if check.status in (FATAL, SUSPECT)]
    fatal = {check.group for check in checks or [] if check.status == FATAL}
    commands = next_commands(runs, diagnosis, bool(fatal & set(BLOCKING)))
    print(*report(diagnosis, rows, commands, folder), sep="\n")
    return 0


def checklist_row(check: ChecklistRow) -> TableRow:
    golden, target = check.values
    return TableRow(check.group, check.subject, check.status, target, golden, math.nan, math.nan, "setting")


def next_commands(runs: Sequence[RunSide], diagnosis: Diagnosis, blocked: bool) -> list[str]:
    """Return the commands that find the cause. blocked: whether settings make records incomparable."""
    if blocked:
        paths = " ".join(shlex.quote(str(run.path / "config")) for run in runs)
        return [f"make the fatal settings equal and train again: diff {paths}"]
    step = step_to_record(diagnosis)
    if step is None:
        return []
    task = "hash" if diagnosis.symptom == NOT_REPRODUCIBLE else "statistics"
    golden, target = (shlex.quote(str(run.record_folder(step))) for run in runs)
    commands = [*(record_step(run.path, step, task) for run in runs)]
    commands.append(f"make compare-records A={target} B={golden}")
    if all(rank_folders(run.path / "monitor") for run in runs):
        paths = " ".join(shlex.quote(str(run.path)) for run in runs)
        commands.append(f"make trend RUNS={shlex.quote(paths)}")
    return commands


def record_step(run: Path, step: int, task: str = "statistics") -> str:
    """Return the command that records a step of a run of this repository; else how a script does."""
    if not (run / "run.json").exists():
        return record_command(run, step)
    words = [f"RUN={run}", f"STEP={step}", *([f"TASK={task}"] if task != "statistics" else [])]
    return f"make record {shlex.join(words)}"


def default_folder(command: str, paths: Sequence[Path]) -> Path:
    """Return results/<command>-<a>-<b>; the names contain those of the studies."""
    names = [re.sub(r"[^A-Za-z0-9._]+", "-", str(path).removeprefix("results/")) for path in paths]
    return Path("results") / "-".join([command, *(name.strip("-.") for name in names)])


def refuse_results(folder: Path) -> None:
    """Refuse a study, a run or a file as the folder of results."""
    taken = (folder / "runs").exists() or (folder / "run.json").exists()
    if taken or (folder.exists() and not folder.is_dir()):
        raise UserError(f"OUT={folder} is a study, a run or a file; fix: name another folder for the results")


if __name__ == "__main__":
    run_command(main)
