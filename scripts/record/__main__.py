"""`make record RUN=results/x/runs/B0 STEP=40`: replay a run up to one step, and record the tensors of that step.

The process is restarted with the environment of the run, because libraries read it when they are loaded. The exit
status is 1 where the replayed numbers differ from metrics.jsonl; the record is written all the same, with a note.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from referee.numerics.record.record_command import RECORDED, record_step, settings
from referee.numerics.record.record_settings import LEVELS
from runtime import run_record
from runtime.errors import run_command
from scripts.record.arguments import result_folder, run_arguments
from study.evaluation.run_replay import enter_environment, open_run

if TYPE_CHECKING:
    from gpt2.replay import RunReplay

USAGE = "make record RUN=results/STUDY/runs/NAME STEP=40"
VARIABLES = {"STEP": "", "LEVEL": "mix", "TASK": "statistics", "OUT": ""}  # and RUN; with their defaults


def main(restart: bool = False) -> int:
    """restart: whether to restart this process with the environment of the run."""
    given = run_arguments("record", USAGE, VARIABLES, ("STEP",), {"LEVEL": LEVELS, "TASK": RECORDED})
    record = run_record.load_given(given.run)
    enter_environment(record, restart)
    out = given.out or result_folder(given.run, "records")
    replay = open_run(given.run, record, given.step)
    out.mkdir(parents=True, exist_ok=True)  # an unusable folder is known before the replay
    place = record_run(replay, out, given.level, given.task)
    print(f"recorded: {place} ({given.level}, {given.task})")
    compare = f"make compare-records A=OTHER/{place.name} B={place}"
    print(f"next: record step {given.step} of the other run as well, then {compare}")
    return show_differences(replay)


def record_run(replay: RunReplay, out: Path, level: str, task: str) -> Path:
    """Record the chosen step of a run, and print how exact the replay is. Returns the folder of the step."""
    from referee.numerics.record.recorder import Recorder

    origin = f"the checkpoint at {replay.start}" if replay.start else "the start"
    before = f"{replay.step - 1 - replay.start} steps before it"
    print(f"{replay.record.run}: step {replay.step} of {replay.planned}, from {origin}: {before}", flush=True)
    recorder, steps = Recorder(settings(out, level, task)), replay.steps()
    steps.advance()
    if replay.run.stepper.compile:
        steps.function()  # compared with the run; the recorded one runs without torch.compile
        steps.restore()
        recorder.note(f"step {replay.step} is recorded without torch.compile")
    reason = record_step(steps, recorder)
    for difference in replay.differences:
        recorder.note(difference)
    recorder.step()
    if reason:
        print(reason)
    if replay.checked and not replay.differences:
        of = f"{replay.checked} of {replay.step - replay.start} replayed steps"
        print(f"exact: {of} equal metrics.jsonl in loss and gradient norm, to the bit")
    elif not replay.checked:
        print("not checked: metrics.jsonl has none of these steps")
    return out / f"step{replay.step}"


def show_differences(replay: RunReplay) -> int:
    """Print how the replay differs from the run, and why it may. Returns the exit status."""
    for line in replay.differences:
        print(f"not exact: {line}", file=sys.stderr)
    if replay.differences:
        reasons = (
            "; ".join(replay.reasons()) or "nothing that run.json records differs; see CONFIG_DETERMINISTIC"
        )
        print(f"possible reasons: {reasons}", file=sys.stderr)
    return int(bool(replay.differences))


if __name__ == "__main__":
    run_command(functools.partial(main, restart=True))
