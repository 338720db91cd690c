"""`make diagnose RUNS="results/a/runs/B0 results/b/runs/B0"`: why do two runs differ? The first is the benchmark.

python -m scripts.diagnose RUN_DIR RUN_DIR [--out FOLDER]. A file of losses of another trainer may take a run's place.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from referee.numerics.diagnose.diagnosis import report
from referee.numerics.diagnose.symptoms import (
    NOT_REPRODUCIBLE,
    Diagnosis,
    diagnose,
    pair_curves,
    step_to_record,
)
from referee.numerics.monitor.monitor_tables import rank_folders
from referee.numerics.trend.trend import record_command
from runtime.errors import UserError, run_command
from scripts.record import result_folder
from study.compare.loaded_studies import (
    ABSENT,
    BLOCKING,
    RunSide,
    check_paths,
    differing_settings,
    read_sides,
)
from study.make_arguments import command_arguments

USAGE = 'fix: make diagnose RUNS="results/a/runs/B0 results/b/runs/B0"'


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.diagnose")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(command_arguments(("OUT",), paths="RUNS"))
    check_paths(given.runs, 2, USAGE)
    runs = read_sides(given.runs)
    folder = results_folder("diagnose", given.runs, given.out)
    pair = pair_curves(runs[0].curve, runs[1].curve, max(run.epsilon for run in runs))
    settings = differing_settings(*runs)
    are_recorded = all(run.has_settings for run in runs)
    diagnosis = diagnose(pair, are_recorded and not settings)
    for record in (run.record for run in runs if run.record):
        if record.status != "finished":
            diagnosis.notes.append(f"{record.run} is {record.status}: {record.error or 'no error'}")
    if not are_recorded:
        diagnosis.notes.append("settings are not compared: a side has no complete run.json")
    blocked = any(
        row.call.startswith(BLOCKING) and ABSENT not in (row.target, row.golden) for row in settings
    )
    print(*report(diagnosis, settings, next_commands(runs, diagnosis, blocked), folder), sep="\n")
    return 0


def next_commands(runs: Sequence[RunSide], diagnosis: Diagnosis, blocked: bool) -> list[str]:
    """Return the commands that find the cause. blocked: whether settings make records incomparable."""
    if blocked:
        paths = " ".join(shlex.quote(str(run.path / "config")) for run in runs)
        return [f"make these settings equal and train again: diff {paths}"]
    step = step_to_record(diagnosis)
    if step is None:
        return []
    task = "hash" if diagnosis.symptom == NOT_REPRODUCIBLE else "statistics"
    folders = [
        result_folder(run.path, "records") if run.record else run.path.with_suffix(".records") for run in runs
    ]
    golden, target = (shlex.quote(str(folder / f"step{step}")) for folder in folders)
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


def results_folder(command: str, paths: Sequence[Path], out: Path | None) -> Path:
    """Return OUT or results/<command>-<a>-<b>. UserError where it is a study, a run or a file."""
    names = [re.sub(r"[^A-Za-z0-9._]+", "-", str(path).removeprefix("results/")) for path in paths]
    folder = out or Path("results") / "-".join([command, *(name.strip("-.") for name in names)])
    taken = (folder / "runs").exists() or (folder / "run.json").exists()
    if taken or (folder.exists() and not folder.is_dir()):
        raise UserError(f"OUT={folder} is a study, a run or a file; fix: name another folder for the results")
    return folder


if __name__ == "__main__":
    run_command(main)
