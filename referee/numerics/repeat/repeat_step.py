"""Repeat a step under several conditions and conclude why it is not reproducible.

found = repeat_step(step, state=(model, optimizer), times=8)
print(found.verdict)
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from referee.errors import NumericsError
from referee.numerics.dump_files import write_json, writing
from referee.numerics.repeat.conditions import Conditions
from referee.numerics.repeat.repeat_evidence import Evidence, Repetition
from referee.numerics.replayed_step import ReplayedStep

MOST_TIMES = 1000


def repeat_step(
    step: Callable[[], Any] | ReplayedStep,
    state: Mapping[str, Any] | Sequence[Any] = (),
    times: int = 8,
    threads: int | None = None,
    synchronise: Callable[[], object] | None = None,
    others: Callable[[Conditions], None] = lambda conditions: None,
    progress: Callable[[str], object] = lambda name: None,
) -> Repetition:
    """Repeat a step in this process and conclude.

    Args:
        step: runs one step; tensors that it returns are results. A ReplayedStep has its state already.
        state: objects with state_dict, restored before each repetition: the model, the optimizer.
        times: repetitions of each condition, at least 2.
        threads: of the CPU, besides one thread. By default torch's number, or all CPUs where torch has one thread.
        synchronise: waits for all queued work; by default that of the accelerator.
        others: adds conditions of other processes.
        progress: receives the name of each condition.

    NumericsError where `times` or a state cannot be used. The state of before is restored at the end.
    """
    if isinstance(times, bool) or not isinstance(times, int) or not 2 <= times <= MOST_TIMES:
        raise NumericsError(f"times is {times!r}; fix: a number from 2 to {MOST_TIMES}")
    if not isinstance(step, ReplayedStep):
        step = ReplayedStep(step, state)
    many = torch.get_num_threads()
    many = threads or (many if many > 1 else os.cpu_count() or 1)
    if synchronise is None and torch.accelerator.is_available():
        synchronise = torch.accelerator.synchronize
    conditions = Conditions(step, times, many, synchronise, progress)
    try:
        conditions.run()
        others(conditions)
        return Repetition(conditions.found, Evidence(conditions.found, conditions.capture).collect())
    finally:
        step.restore()


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
    from referee.numerics.replayed_step import load_replay

    step = load_replay(given.step)
    step.advance()
    if given.child:
        child(step, *given.child)
        return 0
    prepare(given.output_path)
    command = [sys.executable, "-m", "referee", "repeat", given.step, "--child"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = repeat_step(
        step,
        times=given.times,
        threads=given.threads,
        others=lambda conditions: conditions.run_fresh(command, environment),
    )
    return show(found, given.output_path)


def prepare(folder: Path) -> None:
    """Create the folder of results: one that cannot be written is known before the repetitions."""
    with writing(folder, "give another folder for the results"):
        folder.mkdir(parents=True, exist_ok=True)


def show(found: Repetition, folder: Path, notes: tuple[str, ...] = ()) -> int:
    """Print a repeated step and further notes, and write repeat.json. Returns the exit status."""
    print(*found.lines(), *(f"note: {note}" for note in notes), sep="\n")
    with writing(folder, "give another folder for the results"):
        write_json(folder / "repeat.json", found.as_json() | {"notes": [*found.notes, *notes]})
    print(f"wrote {folder / 'repeat.json'}")
    return int(found.is_fault)
