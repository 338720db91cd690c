"""`python -m numerics repeat FILE.py:FUNCTION`: is a training step reproducible, and if not, why?"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from numerics.dump_files import writing

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
    parser.add_argument("-t", "--threads", type=int, help="threads of the CPU, beside one thread")
    parser.add_argument("-o", "--output_path", type=Path, default=Path("repeat"), help="folder of results")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.set_defaults(run=run_repeat)


def run_repeat(given: argparse.Namespace) -> int:
    from numerics.repeat.processes import child, fresh_conditions
    from numerics.repeat.report import report_lines, write_repetition
    from numerics.repeat.step import repeat_step
    from numerics.replayed_step import load_replay

    step = load_replay(given.step)
    step.advance()
    if given.child:
        child(step, *given.child)
        return 0
    with writing(given.output_path, "give another folder for the results"):  # known before the repetitions
        given.output_path.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "numerics", "repeat", given.step, "--child"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = repeat_step(
        step,
        times=given.times,
        threads=given.threads,
        others=lambda conditions: fresh_conditions(command, conditions, environment),
    )
    print(*report_lines(found), sep="\n")
    for path in write_repetition(found, given.output_path, "Is the step reproducible?"):
        print(f"wrote {path}")
    return int(found.is_fault)
