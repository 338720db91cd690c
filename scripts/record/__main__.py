"""`make record RUN=results/x/runs/B0 STEP=40`: replay a run up to one step, and record the tensors of that step.

The process is restarted with the environment of the run, because libraries read it when they are loaded. The exit
status is 1 where the replayed numbers differ from metrics.jsonl; the record is written all the same, with a note.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path

from gpt2.artifacts import run_record
from gpt2.hardware.resolve import export_environment
from gpt2.system.errors import run_command
from scripts.record.arguments import run_arguments, study_folder
from study.executors.child_process import process_settings

USAGE = "make record RUN=results/STUDY/runs/NAME STEP=40"
RESTARTED = "RA_RESTARTED"  # set in the process that was restarted
VARIABLES = {"STEP": "", "LEVEL": "mix", "TASK": "statistics", "OUT": ""}  # and RUN; with their defaults
LEVELS = ("L0", "L1", "mix")
TASKS = {  # TASK= -> task and summary_mode of the recorder
    "statistics": ("statistics", "statistics"),
    "tensor": ("tensor", "statistics"),
    "hash": ("statistics", "md5"),
}


def main(restart: bool = False) -> int:
    """restart: whether to restart this process with the environment of the run."""
    arguments = parse_arguments()
    run_dir: Path = arguments.run
    record = run_record.load_given(run_dir)
    enter_environment(record, restart)
    from numerics.record.record_settings import RecorderConfig
    from numerics.record.recorder import Recorder
    from scripts.record.replay import RunReplay

    out = arguments.out or default_folder(run_dir)
    task, summary = TASKS[arguments.task]
    config = RecorderConfig(dump_path=str(out), level=arguments.level, task=task, summary_mode=summary)
    replay = RunReplay(run_dir, record, arguments.step)
    out.mkdir(parents=True, exist_ok=True)  # an unusable folder is known before the replay
    print(*replay.skipped, sep="\n", end="\n" if replay.skipped else "")
    origin = f"the checkpoint at {replay.start}" if replay.start else "the start"
    about = f", about {replay.seconds:.0f} s" if replay.seconds else ""
    before = arguments.step - 1 - replay.start
    print(
        f"{record.run}: step {arguments.step} of {replay.planned}, from {origin}: {before} steps before it{about}",
        flush=True,
    )
    outcome = replay.record_step(Recorder(config))
    step = f"step{arguments.step}"
    if outcome.result:
        print(f"loss {outcome.result.loss!r}, gradient norm {outcome.result.gradient_norm!r}")
    for note in outcome.notes:
        if note not in outcome.differences:
            print(note)
    if outcome.checked and not outcome.differences:
        of = f"{outcome.checked} of {arguments.step - outcome.start} replayed steps"
        print(f"exact: {of} equal metrics.jsonl in loss and gradient norm, to the bit")
    elif not outcome.checked:
        print("not checked: metrics.jsonl has none of these steps")
    print(f"recorded: {out / step} ({arguments.level}, {arguments.task})")
    compare = f"make compare-records A=OTHER/{step} B={out / step}"
    print(f"next: record step {arguments.step} of the other run as well, then {compare}")
    for line in outcome.differences:
        print(f"not exact: {line}", file=sys.stderr)
    if outcome.differences:
        reasons = (
            "; ".join(replay.reasons()) or "nothing that run.json records differs; see CONFIG_DETERMINISTIC"
        )
        print(f"possible reasons: {reasons}", file=sys.stderr)
    return 1 if outcome.differences else 0


def parse_arguments() -> argparse.Namespace:
    """Parse the variables of make. UserError names a wrong one."""
    choices = {"LEVEL": LEVELS, "TASK": TASKS}
    return run_arguments("record", USAGE, VARIABLES, ("STEP",), choices)


def enter_environment(record: run_record.RunRecord, restart: bool) -> dict[str, str]:
    """Set the variables of this machine and return the environment of the run. Call before torch is imported.

    restart: whether to restart this process, once, where its environment is another.
    """
    export_environment()
    restarted = os.environ.pop(RESTARTED, None)
    environment = run_environment(record)
    if restart and not restarted and environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment | {RESTARTED: "1"})
    return environment


def run_environment(record: run_record.RunRecord) -> dict[str, str]:
    """Return the environment of the training process: this one's, with the recorded variables of the run."""
    recorded = record.environment.variables if record.environment else {}
    return process_settings(os.environ | {name: str(value) for name, value in recorded.items()})


def default_folder(run_dir: Path) -> Path:
    """Return results/STUDY/records/NAME, or records/NAME for a run outside a study."""
    return study_folder(run_dir) / "records" / run_dir.resolve().name


if __name__ == "__main__":
    run_command(functools.partial(main, restart=True))
