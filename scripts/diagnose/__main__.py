"""`make diagnose RUNS="results/a/runs/B0 results/b/runs/B0"`: why do two runs differ? The first is the benchmark.

python -m scripts.diagnose RUN_DIR RUN_DIR [--out FOLDER]. A file of losses of another trainer may take a run's place.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from referee.numerics.diagnose.diagnosis import report
from referee.numerics.diagnose.pair import pair_curves
from referee.numerics.diagnose.symptoms import NOT_REPRODUCIBLE, Diagnosis, diagnose, step_to_record
from referee.numerics.monitor.tables import rank_folders
from referee.numerics.rows import TableRow
from referee.numerics.setup.checklist_rows import FATAL, SUSPECT, ChecklistRow, worst_first
from referee.numerics.trend.trend import record_command
from runtime.errors import UserError, run_command
from scripts.diagnose.runs import (
    RunSide,
    read_runs,
    run_checks,
    run_scores,
    same_settings,
    status_notes,
)
from study.make_arguments import command_arguments

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
