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

from gpt2.artifacts import run_record
from gpt2.system.errors import UserError, run_command
from gpt2.system.progress import LiveLine
from scripts.record.arguments import result_folder, run_arguments
from scripts.record.run_replay import enter_environment, open_run

if TYPE_CHECKING:
    from gpt2.numerics_replay import RunReplay

USAGE = "make repeat RUN=results/STUDY/runs/NAME STEP=40"
VARIABLES = {"STEP": "", "TIMES": "8", "OUT": ""}  # and RUN; with their defaults
MOST_TIMES = 1000


def main(restart: bool = False) -> int:
    """restart: whether to restart this process with the environment of the run."""
    arguments = parse_arguments()
    run_dir: Path = arguments.run
    record = run_record.load_given(run_dir)
    environment = enter_environment(record, restart)
    out = arguments.out or result_folder(run_dir, "repeat") / f"step{arguments.step}"
    replay = open_run(run_dir, record, arguments.step)
    if arguments.child:
        return repeat_in_child(replay, arguments.child)
    return repeat(replay, out, arguments.times, environment)


def parse_arguments() -> argparse.Namespace:
    """Parse the variables of make. UserError names a wrong one."""
    found = run_arguments("repeat", USAGE, VARIABLES, ("STEP",), hidden={"child": 4})
    text = found.times
    if not (text.isascii() and text.isdigit() and 2 <= int(text) <= MOST_TIMES):
        raise UserError(f"TIMES={text} is not a number from 2 to {MOST_TIMES}; fix: {USAGE}")
    found.times = int(text)
    return found


def repeat(replay: RunReplay, out: Path, times: int, environment: dict[str, str]) -> int:
    """Replay the steps before, repeat the step, print and write the conclusion."""
    import torch

    from numerics.repeat.processes import fresh_conditions
    from numerics.repeat.report import report_lines, write_repetition
    from numerics.repeat.step import repeat_step

    out.mkdir(parents=True, exist_ok=True)  # an unusable folder is known before the replay
    name = f"{replay.record.run}, step {replay.step}"
    print(f"{name} of {replay.planned}: {replay.step - 1 - replay.start} steps before it", flush=True)
    step = replay.steps()
    with LiveLine() as line, tempfile.TemporaryDirectory() as folder:
        step.advance()
        state = Path(folder) / "state.pt"
        torch.save(replay.run.stepper.state(), state)
        command = [
            sys.executable, "-m", "scripts.repeat", f"--run={replay.run_dir}", f"--step={replay.step}",
            "--child", str(state),
        ]  # fmt: skip
        found = repeat_step(
            step,
            times=times,
            others=lambda conditions: fresh_conditions(command, conditions, environment),
            progress=lambda condition, done, total: line.update(
                f"{name}: {condition}, {done + 1} of {total}", done / total
            ),
        )
    notes = found.notes
    notes += [f"not equal to the run: {text}" for text in replay.differences]
    notes += [f"possible reason: {text}" for text in replay.reasons()] if replay.differences else []
    if replay.checked and not replay.differences:
        notes.append(
            f"{replay.checked} replayed steps equal metrics.jsonl in loss and gradient norm, to the bit"
        )
    if replay.differences and not found.causes:
        notes.append(
            "the step is reproducible here and differs from the run; next: make stress, on the run's machine"
        )
    if replay.run.stepper.compile:
        notes.append("observed repetitions ran without torch.compile")
    print(*report_lines(found), sep="\n")
    for path in write_repetition(found, out, f"Is {name} reproducible?"):
        print(f"wrote {path}")
    return int(found.is_fault)


def repeat_in_child(replay: RunReplay, arguments: list[str]) -> int:
    """Repeat the step in a fresh process, from the state that the first process saved."""
    import torch

    from numerics.repeat.processes import child

    file, *rest = arguments
    stepper = replay.run.stepper
    stepper.load_state(torch.load(file, map_location=stepper.device, weights_only=True))
    replay.run.iteration = replay.step - 1
    child(replay.steps(), *rest)
    return 0


if __name__ == "__main__":
    run_command(functools.partial(main, restart=True))
