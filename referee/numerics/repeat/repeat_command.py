"""`python -m referee repeat FILE.py:FUNCTION`: is a training step reproducible, and if not, why?"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from referee.numerics.text_files import create_folder, write_json, writing

if TYPE_CHECKING:
    from referee.numerics.repeat.repeat_evidence import Repetition

DESCRIPTION = """
Repeat one training step in this process and in fresh processes, with one and several threads, with and without
synchronisation, and name the first operation with equal inputs and unequal outputs. FUNCTION builds the step: it
returns (step, state), a function that runs one step and the objects with state_dict that it changes. The exit status is
0 where the step is reproducible or differs by harmless rounding, else 1.
"""


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "repeat", description=DESCRIPTION, help="is a step reproducible, and if not, why?"
    )
    parser.add_argument("step", metavar="FILE.py:FUNCTION")
    parser.add_argument("-n", "--times", type=int, default=8, help="repetitions of each condition")
    parser.add_argument("-t", "--threads", type=int, help="threads of the CPU, besides one thread")
    parser.add_argument("-o", "--output_path", type=Path, default=Path("repeat"), help="folder of results")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.set_defaults(run=run_repeat)


def run_repeat(given: argparse.Namespace) -> int:
    from referee.numerics.repeat.conditions import child
    from referee.numerics.repeat.repeat_evidence import repeat_step
    from referee.numerics.replayed_step import load_replay

    step = load_replay(given.step)
    step.advance()
    if given.child:
        child(step, *given.child)
        return 0
    create_folder(given.output_path)
    command = [sys.executable, "-m", "referee", "repeat", given.step, "--child"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = repeat_step(
        step,
        times=given.times,
        threads=given.threads,
        others=lambda conditions: conditions.run_fresh(command, environment),
    )
    return show(found, given.output_path)


def show(found: Repetition, folder: Path, notes: tuple[str, ...] = ()) -> int:
    """Print a repeated step and further notes, and write repeat.json. Returns the exit status."""
    print(*found.lines(), *(f"note: {note}" for note in notes), sep="\n")
    with writing(folder, "give another folder for the results"):
        write_json(folder / "repeat.json", found.as_json() | {"notes": [*found.notes, *notes]})
    print(f"wrote {folder / 'repeat.json'}")
    return int(found.is_fault)
