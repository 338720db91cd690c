"""Execute one task on a node of a cluster, and write exit.json at its end.

python -m study.executors.place TASKS INDEX     TASKS: a JSON file of tasks, or the JSON itself

SIGTERM: the run saves and ends. SIGUSR1, which Slurm sends before a time limit: the same, and the job is put back into
the queue, where it continues from its checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from runtime.dotconfig import read_symbols
from runtime.resolved_target import export_environment
from runtime.settings import Config
from runtime.signals import end_with_parent
from study.executors.child_process import EXIT_INTERRUPTED, PLACE, Session, Slot, StopAsked
from study.executors.executor import EXIT_FILE, Ended, LocalExecutor, Task, run_tasks, write_exit
from study.trackers import ExperimentLoggers


def task_to_json(task: Task) -> dict[str, Any]:
    """Return plain data of a task, with absolute paths."""
    return {
        "name": task.name,
        "arguments": list(task.arguments),
        "folder": str(task.folder.absolute()),
        "log": str(task.log.absolute()),
    }


def read_task(tasks: str, index: int) -> Task:
    """Return the task of a JSON list, given as text or as a file."""
    text = tasks if tasks.startswith("[") else Path(tasks).read_text()
    task = json.loads(text)[index]
    return Task(task["name"], tuple(task["arguments"]), Path(task["folder"]), Path(task["log"]))


class Requeue:
    """Whether Slurm announced the end of the job's time."""

    def __init__(self, session: Session) -> None:
        self.session, self.announced = session, False

    def note(self, number: int, frame: FrameType | None) -> None:
        self.announced = True
        self.session._ask(signal.SIGTERM, frame)

    def requeue(self) -> bool:
        """Put this job back into Slurm's queue; False where that is not asked for, or fails."""
        if not self.announced:
            return False
        job = os.environ[PLACE].removeprefix("slurm ")
        return subprocess.run(["scontrol", "requeue", job], stdout=sys.stderr).returncode == 0


def execute(task: Task) -> int:
    """Execute the task; return its exit status."""
    task.folder.mkdir(parents=True, exist_ok=True)
    (task.folder / EXIT_FILE).unlink(missing_ok=True)
    config = Config.from_symbols(read_symbols(Path(task.arguments[0]) / "config"))
    export_environment(config.target.name, deterministic=config.target.deterministic)
    session = Session()
    requeue = Requeue(session)
    executor = LocalExecutor(session, [Slot("")], lambda folder: ExperimentLoggers(folder, config.tracking))
    with session.signals():
        signal.signal(signal.SIGUSR1, requeue.note)
        try:
            (ended,) = run_tasks(executor, [task])
        except StopAsked:
            ended = Ended(task.name, EXIT_INTERRUPTED)
    status = EXIT_INTERRUPTED if ended.status is None else ended.status
    if session.asked and status == -signal.SIGTERM:  # asked before it could handle the signal
        status = EXIT_INTERRUPTED
    if status == EXIT_INTERRUPTED and requeue.requeue():
        return status
    write_exit(task.folder, replace(ended, status=status))
    return status


def main() -> int:
    end_with_parent(signal.SIGTERM)
    tasks, index = sys.argv[1:]
    task = read_task(tasks, int(index))
    with contextlib.suppress(KeyboardInterrupt):
        return execute(task)
    return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
