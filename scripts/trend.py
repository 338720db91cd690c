"""`make trend RUNS="results/a/runs/B0 [results/b/runs/B0]"`: trends of monitored runs, the reference first.

python -m scripts.trend RUN_DIR [RUN_DIR] [--out FOLDER].
"""

from __future__ import annotations

import argparse
from pathlib import Path

from referee.numerics.trend.trend import show
from runtime.errors import UserError, run_command
from scripts.diagnose import default_folder, record_step, refuse_results
from study.make_arguments import command_arguments

USAGE = 'fix: make trend RUNS="results/a/runs/B0 [results/b/runs/B0]"'


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.trend")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(command_arguments(("OUT",), paths="RUNS"))
    paths: list[Path] = arguments.runs
    if not 1 <= len(paths) <= 2:
        raise UserError(f"RUNS names {len(paths)} runs, one or two are needed; {USAGE}")
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist; {USAGE}")
        if (path / "runs").is_dir():
            raise UserError(f"{path} is a study; fix: name one of its runs, such as {path / 'runs/B0'}")
    folder = arguments.out or default_folder("trend", paths)
    refuse_results(folder)
    print(*show(paths, folder, record_step), sep="\n")
    return 0


if __name__ == "__main__":
    run_command(main)
