"""`make trend RUNS="results/a/runs/B0 [results/b/runs/B0]"`: trends of monitored runs, the reference first.

python -m scripts.trend RUN_DIR [RUN_DIR] [--out FOLDER].
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from configuration.arguments import command_arguments
from gpt2.system.errors import UserError, run_command
from numerics.trend.command import read_runs, show
from numerics.trend.tables import has_monitor
from scripts.diagnose.__main__ import default_folder, record_step, refuse_results, watch_more
from study.compare.load import labels

USAGE = 'fix: make trend RUNS="results/a/runs/B0 [results/b/runs/B0]"'


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.trend")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(command_arguments(("OUT",), paths="RUNS"))
    return show_trend(arguments.runs, arguments.out)


def show_trend(paths: Sequence[Path], out: Path | None) -> int:
    if not 1 <= len(paths) <= 2:
        raise UserError(f"RUNS names {len(paths)} runs, one or two are needed; {USAGE}")
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist; {USAGE}")
        if (path / "runs").is_dir():
            raise UserError(f"{path} is a study; fix: name one of its runs, such as {path / 'runs/B0'}")
        if (path / "run.json").exists() and not has_monitor(path):
            raise UserError(f"{path} has no monitor files; fix: train with CONFIG_MONITOR=y")
    names = labels(paths)
    folder = out or default_folder("trend", paths, names)
    refuse_results(folder)
    runs = read_runs(paths, names, [None] * len(paths))
    print(*show(runs, folder, record_step, watch_more), sep="\n")
    return 0


if __name__ == "__main__":
    run_command(main)
