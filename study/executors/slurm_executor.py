"""Run tasks as arrays of Slurm jobs: sbatch, squeue and scancel. CONFIG_EXECUTOR_SLURM.

    <study>/slurm/<token>.tasks.json   the tasks of an array, written before it is submitted; the job's name is <token>

A driver that is killed loses nothing: the next one finds the jobs by their names and follows them. squeue only says
that a job is gone; exit.json, which the node writes, says how it ended.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime import files
from runtime.errors import UserError
from study.executors.executor import EXIT_FILE, Ended, FollowedTask, Message, Started, Task, task_to_json

ARRAY_TASKS = 1000  # of one array; Slurm's MaxArraySize is 1001 by default
UNLIMITED = 1_000_000
SIGNAL_SECONDS = 120  # before the time limit: for a step to end and a checkpoint to be written
FIRST_POLL_SECONDS, MOST_POLL_SECONDS = 1.0, 15.0
GRACE_SECONDS = 20.0  # for exit.json to appear on a shared folder after the job is gone

BATCH = """#!/bin/bash
cd {root} || exit 1
export RA_PLACE="slurm ${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
exec {python} -m study.executors.executor {tasks} "$SLURM_ARRAY_TASK_ID"
"""


@dataclass(frozen=True)
class Job:
    """A task in the queue. number: as in 12_3."""

    number: str
    state: str
    node: str


@dataclass
class _Followed(FollowedTask):
    job: Job | None = None


class SlurmExecutor:
    """slots: most jobs at once; 0: no limit. options: of sbatch, as on its command line."""

    def __init__(
        self,
        study_dir: Path,
        slots: int = 0,
        options: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder = study_dir / "slurm"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._slots, self._options = slots, shlex.split(options)
        self._clock, self._sleep = clock, sleep
        self._new: list[Task] = []
        self._followed: dict[str, _Followed] = {}
        self._next, self._interval = 0.0, FIRST_POLL_SECONDS
        # Read before the driver reads which runs are finished: a job that ends in between is followed, not repeated.
        self._queue = self.queue()

    def slots(self) -> int:
        return UNLIMITED

    def submit(self, task: Task) -> None:
        if self._queue is None:
            self._queue = self.queue()
            if self._queue is None:
                raise UserError("squeue failed; fix: start `make` where Slurm's commands work")
        self._followed[task.name] = _Followed(task)
        if task.name not in self._queue:
            (task.folder / EXIT_FILE).unlink(missing_ok=True)
            self._new.append(task)

    def queue(self) -> dict[str, Job] | None:
        """Return the tasks of this study in Slurm's queue, by name; None where squeue fails."""
        command = ["squeue", "--me", "--noheader", "--array", "--format=%i|%j|%T|%N"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError:  # Slurm is not installed
            return None
        if done.returncode:
            return None
        names: dict[str, list[str]] = {}
        found: dict[str, Job] = {}
        for line in done.stdout.splitlines():
            number, token, state, node = (line.strip().split("|") + [""] * 3)[:4]
            index = number.partition("_")[2]
            path = self.folder / f"{token}.tasks.json"
            if token not in names:
                names[token] = (
                    [task["name"] for task in json.loads(path.read_text())] if path.exists() else []
                )
            if index.isdecimal() and int(index) < len(names[token]):
                found[names[token][int(index)]] = Job(number, state, node)
        return found

    def _submit_arrays(self) -> None:
        """Submit the new tasks. Their names are on disk before Slurm knows the job."""
        while self._new:
            tasks, self._new = self._new[:ARRAY_TASKS], self._new[ARRAY_TASKS:]
            token = f"ra-{uuid.uuid4().hex[:12]}"
            path = (self.folder / f"{token}.tasks.json").absolute()
            files.write_json(path, [task_to_json(task) for task in tasks])
            limit = f"%{self._slots}" if self._slots else ""
            command = [
                "sbatch", "--parsable", f"--job-name={token}", f"--array=0-{len(tasks) - 1}{limit}", "--requeue",
                f"--signal=B:USR1@{SIGNAL_SECONDS}", "--open-mode=append", f"--output={path.parent}/%A_%a.log",
                *self._options,
            ]  # fmt: skip
            script = BATCH.format(
                root=shlex.quote(str(Path.cwd())),
                python=shlex.quote(sys.executable),
                tasks=shlex.quote(str(path)),
            )
            done = subprocess.run(command, input=script, capture_output=True, text=True)
            if done.returncode:
                path.unlink()
                words = " ".join(done.stderr.split())
                raise UserError(
                    f"sbatch refused {len(tasks)} tasks: {words}; fix: CONFIG_SLURM_OPTIONS, then run `make`"
                )

    def poll(self, seconds: float) -> Sequence[Message]:
        self._submit_arrays()
        now = self._clock()
        if now < self._next:
            self._sleep(min(seconds, self._next - now))
            return []
        self._queue = self.queue()
        found = self._look(self._queue) if self._queue is not None else []
        busy = any(isinstance(message, (Started, Ended)) for message in found)
        self._interval = FIRST_POLL_SECONDS if busy else min(self._interval * 1.5, MOST_POLL_SECONDS)
        self._next = self._clock() + self._interval
        return found

    def _look(self, queue: dict[str, Job]) -> list[Message]:
        found: list[Message] = []
        for name, followed in [*self._followed.items()]:
            followed.job = queue.get(name)
            if followed.job:
                followed.gone_at = None
                if followed.job.state == "RUNNING":
                    found += followed.running(f"{followed.job.number} on {followed.job.node}")
            elif end := followed.ended(self._clock(), GRACE_SECONDS):
                found += [end] if followed.started else [Started(name), end]
                del self._followed[name]
        return found

    def stop(self, name: str) -> None:
        self._new = [task for task in self._new if task.name != name]
        job = (self.queue() or {}).get(name)
        if job:
            running = ["--batch", "--signal=TERM"] if job.state == "RUNNING" else []
            subprocess.run(["scancel", *running, job.number], capture_output=True)

    def close(self) -> str:
        """Leave the jobs in Slurm."""
        jobs = sorted({followed.job.number for followed in self._followed.values() if followed.job})
        self._followed.clear()
        if not jobs:
            return ""
        arrays = " ".join(sorted({number.partition("_")[0] for number in jobs}))
        return f"{len(jobs)} jobs continue in Slurm; `make` follows them again; to stop them:\n  scancel {arrays}"
