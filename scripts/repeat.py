"""`make repeat RUN=results/x/runs/B0 STEP=40 [TIMES=8]`: is this step reproducible, and if not, why?

The run is replayed up to the step, as by `make record`. The step is then repeated from one state under several
conditions, in this process and in fresh ones. The exit status is 0 where it is reproducible or differs by harmless
rounding, else 1. The run's folder is only read.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from runtime import run_record
from runtime.errors import UserError, run_command
from runtime.output import LiveLine
from scripts.record import result_folder, run_arguments
from study.evaluation.loaded_runs import enter_environment, open_run

if TYPE_CHECKING:
    from gpt2.replay import RunReplay

USAGE = "make repeat RUN=results/STUDY/runs/NAME STEP=40"
VARIABLES = {"STEP": "", "TIMES": "8", "OUT": ""}  # and RUN; with their defaults


def main(restart: bool = False) -> int:
    """restart: whether to restart this process with the environment of the run."""
    given = run_arguments("repeat", USAGE, VARIABLES, ("STEP",), hidden={"child": 3})
    if not (given.times.isascii() and given.times.isdigit() and 2 <= int(given.times) <= 1000):
        raise UserError(f"TIMES={given.times} is not a number from 2 to 1000; fix: {USAGE}")
    record = run_record.load_given(given.run)
    environment = enter_environment(record, restart)
    replay = open_run(given.run, record, given.step)
    return repeat_in_child(replay, *given.child) if given.child else repeat(replay, given, environment)


def repeat(replay: RunReplay, given: argparse.Namespace, environment: dict[str, str]) -> int:
    """Replay the steps before, repeat the step, print and write the conclusion."""
    import torch

    from referee.numerics.repeat.repeat_command import show
    from referee.numerics.repeat.repeat_evidence import repeat_step
    from referee.numerics.text_files import create_folder

    out = given.out or result_folder(given.run, "repeat") / f"step{replay.step}"
    create_folder(out)
    name = f"{replay.record.run}, step {replay.step}"
    print(f"{name} of {replay.planned}: {replay.step - 1 - replay.start} steps before it", flush=True)
    step = replay.steps()
    with LiveLine() as line, tempfile.TemporaryDirectory() as folder:
        step.advance()
        state = Path(folder) / "state.pt"
        torch.save(replay.run.stepper.state(), state)
        command = [
            sys.executable, "-m", "scripts.repeat", f"--run={given.run}", f"--step={replay.step}", "--child",
            str(state),
        ]  # fmt: skip
        found = repeat_step(
            step,
            times=int(given.times),
            others=lambda conditions: conditions.run_fresh(command, environment),
            progress=lambda condition: line.update(f"{name}: {condition}"),
        )
    return show(found, out, tuple(run_notes(replay, bool(found.causes))))


def run_notes(replay: RunReplay, differs: bool) -> list[str]:
    """Return how the replayed steps compare with the run. differs: whether the step differs between repetitions."""
    notes = [f"not equal to the run: {text}" for text in replay.differences]
    if replay.differences:
        notes += [f"possible reason: {text}" for text in replay.reasons()]
        if not differs:
            notes.append("the step is reproducible here; next: make stress, on the run's machine")
    elif replay.checked:
        notes.append(
            f"{replay.checked} replayed steps equal metrics.jsonl in loss and gradient norm, to the bit"
        )
    if replay.run.stepper.compile:
        notes.append("observed repetitions ran without torch.compile")
    return notes


def repeat_in_child(replay: RunReplay, state: str, file: str, threads: str) -> int:
    """Repeat the step in a fresh process, from the state that the first process saved."""
    import torch

    from referee.numerics.repeat.conditions import child

    stepper = replay.run.stepper
    stepper.load_state(torch.load(state, map_location=stepper.device, weights_only=True))
    replay.run.iteration = replay.step - 1
    child(replay.steps(), file, threads)
    return 0


if __name__ == "__main__":
    run_command(functools.partial(main, restart=True))
