"""`python -m numerics repeat FILE.py:FUNCTION`: is a training step reproducible, and if not, why?"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numerics.dump_files import writing
from numerics.errors import NumericsError

if TYPE_CHECKING:
    from numerics.repeat.conditions import RepeatableStep

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
    from numerics.repeat.report import write_repetition
    from numerics.repeat.step import repeat_step

    step = load_step(given.step)
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
    print(found.text())
    for path in write_repetition(found, given.output_path, "Is the step reproducible?"):
        print(f"wrote {path}")
    return int(found.conclusion.is_fault)


def load_step(text: str) -> RepeatableStep:
    """Import FILE.py and call FUNCTION. NumericsError where either cannot be used."""
    from numerics.repeat.conditions import RepeatableStep

    path, colon, name = text.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise NumericsError(f"{text} names no function; fix: FILE.py:FUNCTION")
    if not Path(path).is_file():
        raise NumericsError(f"{path} is not a file; fix: FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise NumericsError(f"{path} is not a Python file; fix: FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))  # its imports work as in a script
    spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        raise NumericsError(f"{path} has no function {name}; fix: FILE.py:FUNCTION")
    made = make()
    if isinstance(made, RepeatableStep):
        return made
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        return RepeatableStep(made[0], made[1])
    raise NumericsError(
        f"{name} returned {type(made).__name__}; fix: return (step, state), a function and the objects that it changes"
    )
