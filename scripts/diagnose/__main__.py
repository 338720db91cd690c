"""`make diagnose RUNS="results/a/runs/B0 results/b/runs/B0"`: why do two runs differ? The first is the benchmark.

python -m scripts.diagnose RUN_DIR RUN_DIR [--out FOLDER]. A file of losses of another trainer may take a run's place.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from configuration.arguments import command_arguments
from gpt2.system.errors import UserError, run_command
from numerics.diagnose.flow import Situation, walk
from numerics.diagnose.pair import pair_curves
from numerics.diagnose.rules import diagnose
from numerics.diagnose.write import terminal_lines, write_diagnosis
from numerics.errors import NumericsError
from numerics.monitor.tables import rank_folders
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
    checks, reason = run_checks(runs)
    diagnosis = diagnose(pair, same_settings(checks), run_scores(runs))
    diagnosis.notes.extend(status_notes(runs))
    situation = Situation(
        (runs[0].side(0), runs[1].side(1)),
        compare_command,
        checks,
        reason,
        f"diff {shlex.quote(str(runs[0].path / 'config'))} {shlex.quote(str(runs[1].path / 'config'))}",
        first=1,
        monitored=monitored(runs),
    )
    flow = walk(diagnosis, situation)
    written = write_diagnosis(diagnosis, flow, situation, folder)
    print(*terminal_lines(diagnosis, flow, written), sep="\n")
    return 0


def monitored(runs: Sequence[RunSide]) -> Callable[[], Sequence[str]] | None:
    """Return a function that lists the first anomalies of the second run, or of the only one with monitor files."""
    watched = [run for run in runs if run.record is not None and rank_folders(run.path / "monitor")]
    if not watched:
        return None

    def first_rows() -> Sequence[str]:
        try:
            rows = trend(watched[-1].path, watched[0].path if len(watched) > 1 else None)
        except NumericsError as error:
            return [f"the monitor files cannot be used: {error}"]
        alone = [] if len(watched) > 1 else [f"only {watched[0].label} has monitor files"]
        listed = [f"{row.call} {row.side}, {row.place}: {row.target}, expected {row.golden}" for row in rows]
        names = " ".join(str(run.path) for run in watched)
        return [*alone, *(listed[:MOST_ROWS] or ["no anomaly"]), f"make trend RUNS={shlex.quote(names)}"]

    return first_rows


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
    if (
        (folder / "runs").exists()
        or (folder / "run.json").exists()
        or (folder.exists() and not folder.is_dir())
    ):
        raise UserError(f"OUT={folder} is a study, a run or a file; fix: name another folder for the results")


def compare_command(target: Path, golden: Path) -> str:
    return f"make compare-records {shlex.quote(f'A={target}')} {shlex.quote(f'B={golden}')}"


if __name__ == "__main__":
    run_command(main)
