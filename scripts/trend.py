"""`make trend RUNS="results/a/runs/B0 [results/b/runs/B0]"`: trends of monitored runs, the reference first.

python -m scripts.trend RUN_DIR [RUN_DIR] [--out FOLDER].
"""

from __future__ import annotations

import argparse
from pathlib import Path

from referee.numerics.trend.trend import show
from runtime.errors import run_command
from scripts.diagnose import record_step, results_folder
from study.compare.loaded_studies import check_paths
from study.make_arguments import command_arguments

USAGE = 'fix: make trend RUNS="results/a/runs/B0 [results/b/runs/B0]"'


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.trend")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(command_arguments(("OUT",), paths="RUNS"))
    paths: list[Path] = arguments.runs
    check_paths(paths, 1, USAGE)
    folder = results_folder("trend", paths, arguments.out)
    print(*show(paths, folder, record_step), sep="\n")
    return 0


if __name__ == "__main__":
    run_command(main)
