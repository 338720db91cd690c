"""`python -m referee diagnose A B`: the symptom of two loss files, the first step that differs, the next commands."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from referee.errors import NumericsError
from referee.numerics.diagnose.symptoms import (
    EPSILON,
    NOT_REPRODUCIBLE,
    Diagnosis,
    diagnose,
    pair_curves,
    step_to_record,
)
from referee.numerics.rows import TableRow, text_table
from referee.numerics.text_files import write_json, writing
from referee.verdict.loss_files import read_curve, same_file

DESCRIPTION = """
Name the symptom of two loss curves and the next step to find the cause (sections 1.3 and 2.3 of the guide). A is the
benchmark. Files: CSV with or without a header, JSON lines, trainer_state.json, one loss a line, or a log. The exit
status is 0 for every symptom; it is 1 where a file cannot be used.
"""


def add_commands(commands: Any) -> None:
    """Add diagnose to the commands of `python -m referee`."""
    parser = commands.add_parser(
        "diagnose", description=DESCRIPTION, help="name the symptom of two loss curves"
    )
    parser.add_argument(
        "first", type=Path, help="losses of the benchmark: a file or a folder with metrics.jsonl"
    )
    parser.add_argument("second", type=Path, help="losses of the other run")
    parser.add_argument("-o", "--output_path", type=Path, default=Path("diagnose"), help="folder of results")
    parser.add_argument("--same", action="store_true", help="machine and settings of both runs are the same")
    parser.add_argument("--dtype", choices=EPSILON, default="float32", help="of the computation")
    parser.set_defaults(run=run_diagnose)


def run_diagnose(given: argparse.Namespace) -> int:
    if same_file(given.first, given.second):
        raise NumericsError(f"{given.first} is named twice; fix: name two different files")
    first, second = read_curve(given.first), read_curve(given.second)
    diagnosis = diagnose(pair_curves(first, second, EPSILON[given.dtype]), given.same)
    step, commands = step_to_record(diagnosis), []
    if step is not None:
        base = 0 if 0 in first.losses else 1  # the recorder counts from 0
        kind = {"summary_mode": "md5"} if diagnosis.symptom == NOT_REPRODUCIBLE else {}
        for name in ("first", "second"):
            config = {"task": "statistics", **kind, "level": "mix", "step": [step - base], "dump_path": name}
            commands.append(f"train with PrecisionDebugger and config.json {json.dumps(config)}")
        commands.append(f"python -m referee compare -tp second/step{step - base} -gp first/step{step - base}")
    print(*report(diagnosis, [], commands, given.output_path), sep="\n")
    return 0


def report(
    diagnosis: Diagnosis, more: Sequence[TableRow], commands: Sequence[str], folder: Path
) -> list[str]:
    """Write diagnose.json. Returns the lines for the terminal: table, notes, file, commands.

    more: rows of settings that differ.
    """
    rows, path = [*diagnosis.rows(), *more], folder / "diagnose.json"
    content = {
        "runs": [side.name for side in diagnosis.pair.sides],
        **vars(diagnosis.finding),
        "common_steps": len(diagnosis.pair.steps),
        "rows": [row.as_json for row in rows],
        "record_step": step_to_record(diagnosis),
        "notes": diagnosis.notes,
        "next": list(commands),
    }
    with writing(folder, "give another folder for the results"):
        write_json(path, content)
    return [
        f"symptom: {diagnosis.symptom}, {len(diagnosis.pair.steps)} common steps",
        *text_table(rows),
        *(f"note: {note}" for note in diagnosis.notes),
        f"wrote {path}",
        *([f"next: {command}" for command in commands] or ["next: nothing"]),
    ]
