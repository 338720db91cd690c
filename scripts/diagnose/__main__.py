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

from configuration.arguments import command_arguments
from gpt2.system.errors import UserError, run_command
from numerics.diagnose.diagnosis import report
from numerics.diagnose.pair import pair_curves
from numerics.diagnose.symptoms import (
    DRIFT,
    NOT_REPRODUCIBLE,
    OVERFLOW,
    SPIKES,
    Diagnosis,
    diagnose,
    step_to_record,
)
from numerics.errors import NumericsError
from numerics.monitor.tables import rank_folders
from numerics.rows import TableRow
from numerics.setup.checklist_rows import FATAL, SUSPECT, ChecklistRow, worst_first
from numerics.trend.trend import trend
from numerics.trend.trend_page import record_command
from scripts.diagnose.runs import (
    RunSide,
    read_runs,
    run_checks,
    run_scores,
    same_settings,
    status_notes,
)

MOST_ROWS = 3  # of the table of trends
# Groups of the checklist. Where a fatal row of them differs, records of one step have other inputs or weights.
BLOCKING = ("study", "data", "model", "batch", "schedule", "hyper-parameters")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.diagnose")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(command_arguments(("OUT",), paths="RUNS"))
    return diagnose_runs(read_runs(arguments.runs), arguments.out)


def diagnose_runs(runs: Sequence[RunSide], out: Path | None) -> int:
    folder = out or default_folder("diagnose", [run.path for run in runs], [run.label for run in runs])
    refuse_results(folder)
    pair = pair_curves(runs[0].curve, runs[1].curve, None, max(run.epsilon for run in runs))
    checks = run_checks(runs)
    diagnosis = diagnose(pair, same_settings(checks), run_scores(runs))
    diagnosis.notes.extend(status_notes(runs))
    if checks is None:
        diagnosis.notes.append("no checklist: a side has no complete run.json")
    more = [checklist_row(check) for check in worst_first(checks or []) if check.status in (FATAL, SUSPECT)]
    if {SPIKES, OVERFLOW, DRIFT} & {finding.symptom for finding in diagnosis.findings}:
        more += monitor_rows(runs, diagnosis.notes)
    fatal = {check.group for check in checks or [] if check.status == FATAL}
    commands = next_commands(runs, diagnosis, bool(fatal & set(BLOCKING)))
    print(*report(diagnosis, more, commands, folder), sep="\n")
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
    return [*(run.record_command(step, task) for run in runs), f"make compare-records A={target} B={golden}"]


def monitor_rows(runs: Sequence[RunSide], notes: list[str]) -> list[TableRow]:
    """Return the first anomalies of the second run, or of the only one with monitor files."""
    watched = [run for run in runs if run.record is not None and rank_folders(run.path / "monitor")]
    if not watched:
        return []
    if len(watched) == 1:
        notes.append(f"only {watched[0].label} has monitor files")
    try:
        return trend(watched[-1].path, watched[0].path if len(watched) > 1 else None)[:MOST_ROWS]
    except NumericsError as error:
        notes.append(f"the monitor files cannot be used: {error}")
        return []


def record_step(run: Path, step: int) -> str:
    """Return the command that records a step of a run of this repository; else how a script does."""
    if not (run / "run.json").exists():
        return record_command(run, step)
    return f"make record {shlex.quote(f'RUN={run}')} STEP={step}"


def default_folder(command: str, paths: Sequence[Path], labels: Sequence[str]) -> Path:
    """Return results/<command>-<a>-<b> for runs of a study; else <command>-<a>-<b> beside the first run.

    Of a run of a study the name contains the study, so that results of another study are not replaced.
    """
    whole = [
        f"{path.resolve().parents[1].name}/runs/{label}"
        if path.resolve().parent.name == "runs" and "/" not in label
        else label
        for path, label in zip(paths, labels, strict=True)
    ]
    names = [re.sub(r"[^A-Za-z0-9._]+", "-", label).strip("-.") for label in whole]
    first = paths[0].resolve()
    above = first.parents[2] if first.parent.name == "runs" else first.parent
    above = above.relative_to(Path.cwd()) if above.is_relative_to(Path.cwd()) else above
    return above / "-".join([command, *names])


def refuse_results(folder: Path) -> None:
    """Refuse a study, a run or a file as the folder of results."""
    taken = (folder / "runs").exists() or (folder / "run.json").exists()
    if taken or (folder.exists() and not folder.is_dir()):
        raise UserError(f"OUT={folder} is a study, a run or a file; fix: name another folder for the results")


if __name__ == "__main__":
    run_command(main)
