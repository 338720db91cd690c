"""`make record RUN=results/x/runs/B0 STEP=40`: replay a run up to one step, and record the tensors of that step.

The process is restarted with the environment of the run, because libraries read it when they are loaded. The exit
status is 1 where the replayed numbers differ from metrics.jsonl; the record is written all the same, with a note.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from referee.numerics.record.record_command import RECORDED, record_step, settings
from referee.numerics.record.record_settings import LEVELS
from runtime import run_record
from runtime.errors import UserError, run_command
from study.evaluation.loaded_runs import enter_environment, open_run
from study.make_arguments import command_arguments


def run_arguments(
    program: str,
    usage: str,
    variables: Mapping[str, str],
    needed: Collection[str] = (),
    choices: Mapping[str, Collection[str]] | None = None,
    hidden: Mapping[str, int] | None = None,
    unless: str = "",
) -> argparse.Namespace:
    """Parse RUN and other variables of make. UserError names a wrong one.

    variables: name -> default. needed: those besides RUN without which there is nothing to do, unless the variable
    `unless` is given. choices: name -> allowed values.
    hidden: option of child processes -> number of its words. Folders become paths and STEP a number; each is None
    where it is not given.
    """
    parser = argparse.ArgumentParser(prog=f"scripts.{program}")
    for name, default in {"RUN": "", **variables}.items():
        parser.add_argument(f"--{name.lower()}", default=default)
    for name, words in (hidden or {}).items():
        parser.add_argument(f"--{name}", nargs=words, help=argparse.SUPPRESS)
    found = parser.parse_args(command_arguments(("RUN", *variables)))
    values = vars(found)
    for name in () if values.get(unless.lower()) else ("RUN", *needed):
        if not values[name.lower()]:
            raise UserError(f"{name} is missing; fix: {usage}")
    step = values.get("step", "")
    if step and not (step.isascii() and step.isdigit()):
        raise UserError(f"STEP={step} is not a step number; fix: {usage}")
    for name, allowed in (choices or {}).items():
        if (value := values[name.lower()]) not in ("", *allowed):
            raise UserError(f"{name}={value} is unknown; fix: use {', '.join(allowed)}")
    found.step = int(step) if step else None
    for name in {"run", "against", "record", "other", "out"} & values.keys():
        values[name] = Path(values[name]) if values[name] else None
    if found.run and values.get("out") and found.out.resolve().is_relative_to(found.run.resolve()):
        raise UserError(
            f"OUT={found.out} is in the run's folder, which stays as it is; fix: OUT=another folder"
        )
    return found


def result_folder(run_dir: Path, name: str) -> Path:
    """Return results/STUDY/<name>/RUN, or <name>/RUN for a run outside a study."""
    study = run_dir.parent.parent if run_dir.resolve().parent.name == "runs" else Path()
    return study / name / run_dir.resolve().name


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
