"""`python -m numerics diagnose A B`: diagnose the loss files of two runs of any trainer."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from numerics.diagnose.flow import Side, Situation, walk
from numerics.diagnose.loss_files import read_curve, same_file
from numerics.diagnose.pair import EPSILON, pair_curves
from numerics.diagnose.rules import diagnose
from numerics.diagnose.write import terminal_lines, write_diagnosis
from numerics.errors import NumericsError

DESCRIPTION = """
Name the symptom of two loss curves and the next step to find the cause (sections 1.3 and 2.3 of the guide). A is the
benchmark. Files: CSV with or without a header, JSON lines, trainer_state.json, one loss a line, or a log. The exit
status is 0 for every symptom; it is 1 where a file cannot be used.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "first", type=Path, help="losses of the benchmark: a file, or a folder with metrics.jsonl"
    )
    parser.add_argument("second", type=Path, help="losses of the other run")
    parser.add_argument("-o", "--output_path", type=Path, default=Path("diagnose"), help="folder of results")
    parser.add_argument("--same", action="store_true", help="machine and settings of both runs are the same")
    parser.add_argument("--offset", type=int, help="to add to the steps of the second file")
    parser.add_argument("--dtype", choices=EPSILON, default="float32", help="of the computation")
    parser.add_argument(
        "--records",
        nargs=2,
        type=Path,
        default=(Path("records/first"), Path("records/second")),
        metavar=("A", "B"),
        help="folders of the records of both runs, with step<k>/rank0",
    )


def run_diagnose(given: argparse.Namespace) -> int:
    if same_file(given.first, given.second):
        raise NumericsError(f"{given.first} is named twice; fix: name two different files")
    first, second = read_curve(given.first), read_curve(given.second)
    pair = pair_curves(first, second, given.offset, EPSILON[given.dtype])
    diagnosis = diagnose(pair, given.same)
    base = 0 if 0 in first.losses else 1
    names = ("machine of the first run", "machine of the second run")
    sides = [file_side(folder, name, base) for folder, name in zip(given.records, names, strict=True)]
    situation = Situation((sides[0], sides[1]), compare_command, first=base)
    flow = walk(diagnosis, situation)
    written = write_diagnosis(diagnosis, flow, situation, given.output_path)
    print(*terminal_lines(diagnosis, flow, written), sep="\n")
    return 0


def file_side(folder: Path, machine: str, base: int) -> Side:
    """base: the number of the first step in the files; the recorder counts from 0."""

    def record(step: int, task: str) -> str:
        kind = {"summary_mode": "md5"} if task == "hash" else {}
        config = {
            "task": "statistics",
            **kind,
            "level": "mix",
            "step": [step - base],
            "dump_path": str(folder),
        }
        return f"train with PrecisionDebugger and config.json {json.dumps(config)}"

    return Side(machine, record, lambda step: folder / f"step{step - base}")


def compare_command(target: Path, golden: Path) -> str:
    return f"python -m numerics compare -tp {shlex.quote(str(target))} -gp {shlex.quote(str(golden))}"
