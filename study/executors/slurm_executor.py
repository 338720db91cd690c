"""Run tasks as arrays of Slurm jobs: sbatch, squeue and scancel. CONFIG_EXECUTOR_SLURM.

    <study>/slurm/<token>.tasks   the plan files of an array, a line each, written before it is submitted; the job's
                                  name is <token>

A driver that is killed loses nothing: the next one finds the jobs by their names and follows them. squeue only says
that a job is gone; exit.json, which the node writes, says how it ended.
"""

from __future__ import annotations

import re
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
from study.executors.executor import EXIT_FILE, UNLIMITED, Followed, Message, Notice, Task, read_exit

ARRAY_TASKS = 1000  # of one array; Slurm's MaxArraySize is 1001 by default
SIGNAL_SECONDS = 120  # before the time limit: for a step to end and a checkpoint to be written
FIRST_POLL_SECONDS, MOST_POLL_SECONDS = 1.0, 15.0
GRACE_SECONDS = 20.0  # for exit.json to appear on a shared folder after the job is gone
REFUSED_SECONDS = 30.0  # between two tries to submit where Slurm accepts no more jobs
ANSWER_SECONDS = 60.0  # for sbatch, which itself waits for a controller that is busy
CARDS = ("--gpus", "-G", "--gres", "--gpus-per")  # options that ask for cards

LIMIT = re.compile(r"(?:^|\s)(?:--time[= ]|-t\s*)(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?(?=\s|$)")

# USR1 comes before a time limit: the run saves, and its job goes back into the queue, where it continues.
# A signal ends the first wait with the signal's status; the last one gives that of the process, which bash remembers.
BATCH = """#!/bin/bash
cd {root} || exit 1
plan=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {tasks})
folder=$(dirname "$plan")
export RA_PLACE="slurm ${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
trap 'requeue=1; kill -TERM $child' USR1
trap 'kill -TERM $child' TERM
rm -f "$folder/{exit}"
{python} -m scripts.train "$plan" >> "$folder/log.txt" 2>&1 &
child=$!
while kill -0 $child 2> /dev/null; do wait $child; done
wait $child; status=$?
[ $status -gt 128 ] && echo "{{\\"status\\": $((128 - status))}}" > "$folder/{exit}"
[ "$requeue" ] && [ $status -eq 3 ] && scontrol requeue "$SLURM_JOB_ID"
exit $status
"""


@dataclass(frozen=True)
class Job:
    """A task in the queue. number: as in 12_3."""

    number: str
    state: str
    node: str


def queue(study_dir: Path) -> dict[str, Job] | None:
    """Return the tasks of a study in Slurm's queue, by name; None where squeue fails."""
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
        path = study_dir / "slurm" / f"{token}.tasks"
        if token not in names:
            plans = path.read_text().splitlines() if path.exists() else []
            names[token] = [Path(plan).parent.name for plan in plans]
        if index.isdecimal() and int(index) < len(names[token]):
            found[names[token][int(index)]] = Job(number, state, node)
    return found


class SlurmExecutor:
    """slots: most jobs at once; 0: no limit. options: of sbatch, as on its command line. cards: of a run."""

    def __init__(
        self,
        study_dir: Path,
        slots: int = 0,
        options: str = "",
        cards: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.study_dir = study_dir
        (study_dir / "slurm").mkdir(parents=True, exist_ok=True)
        words = shlex.split(options)
        if cards and not any(word.startswith(CARDS) for word in words):
            words.append(f"--gpus={cards}")
        self._options = words
        self._slots, self._clock, self._sleep = slots, clock, sleep
        self._new: list[Task] = []
        self._followed: dict[str, Followed] = {}
        self._most, self._submit_at, self._refused = ARRAY_TASKS, 0.0, False
        self._next, self._interval = 0.0, FIRST_POLL_SECONDS
        # Read before the driver reads which runs are finished: a job that ends in between is followed, not repeated.
        self._queue = queue(study_dir)

    def slots(self) -> int:
        return UNLIMITED

    def submit(self, task: Task) -> None:
        if self._queue is None:
            self._queue = queue(self.study_dir)
            if self._queue is None:
                raise UserError("squeue failed; fix: start `make` where Slurm's commands work")
        joined = task.name in self._queue
        self._followed[task.name] = Followed(task, joined=joined)
        if not joined:
            self._new.append(task)

    def _submit_arrays(self) -> list[Message]:
        """Submit the new tasks. Those that Slurm refuses wait, and are submitted again in smaller arrays.

        UserError where Slurm refuses a single task while none of this study is in the queue.
        """
        while self._new and self._clock() >= self._submit_at:
            tasks = self._new[: self._most]
            reason = self._sbatch(tasks)
            if not reason:
                self._new = self._new[len(tasks) :]
                self._refused = False
                continue
            submitted = self._followed.keys() - {task.name for task in self._new}
            if len(tasks) == 1 and not submitted:
                raise UserError(f"sbatch refused a job: {reason}; fix: CONFIG_SLURM_OPTIONS, then run `make`")
            self._most = max(1, len(tasks) // 2)
            if submitted:
                self._submit_at = self._clock() + REFUSED_SECONDS
                known, self._refused = self._refused, True
                text = (
                    f"Slurm accepts no more jobs now ({reason}); {len(self._new)} tasks are submitted later"
                )
                return [] if known else [Notice(text)]
        return []

    def _sbatch(self, tasks: Sequence[Task]) -> str:
        """Submit an array, whose tasks are on disk before Slurm knows the job. Returns the reason of a refusal."""
        token = f"ra-{uuid.uuid4().hex[:12]}"
        path = (self.study_dir / "slurm" / f"{token}.tasks").absolute()
        files.write_text(path, "".join(f"{task.plan.absolute()}\n" for task in tasks))
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
            exit=EXIT_FILE,
        )
        try:
            done = subprocess.run(
                command, input=script, capture_output=True, text=True, timeout=ANSWER_SECONDS
            )
        except subprocess.TimeoutExpired:  # it can have been accepted: its tasks stay known
            return f"no answer in {ANSWER_SECONDS:.0f} s"
        if done.returncode:
            path.unlink()
        return " ".join(done.stderr.split()) if done.returncode else ""

    def poll(self, seconds: float) -> Sequence[Message]:
        found = self._submit_arrays()
        now = self._clock()
        if now < self._next:
            self._sleep(min(seconds, self._next - now))
            return found
        self._queue = queue(self.study_dir)
        ends = 0
        if self._queue is not None:
            for name, followed in [*self._followed.items()]:
                found += self._look(name, followed, self._queue.get(name))
                ends += name not in self._followed
        self._interval = FIRST_POLL_SECONDS if ends else min(self._interval * 1.5, MOST_POLL_SECONDS)
        self._next = self._clock() + self._interval
        return found

    def _look(self, name: str, followed: Followed, job: Job | None) -> list[Message]:
        if job:
            followed.gone_at, followed.where = None, f"{job.number} on {job.node}"
            return followed.progress() if job.state == "RUNNING" else []
        if any(task.name == name for task in self._new):
            return []
        if not read_exit(followed.task.folder) and not followed.lost(self._clock(), GRACE_SECONDS):
            return []
        del self._followed[name]
        return followed.ended(None)

    def stop(self, names: Sequence[str]) -> None:
        """Ask the jobs to save and end, and remove those that wait."""
        self._new = [task for task in self._new if task.name not in names]
        jobs = [job for name, job in (queue(self.study_dir) or {}).items() if name in names]
        for options, running in ((["--batch", "--signal=TERM"], True), ([], False)):
            numbers = [job.number for job in jobs if (job.state == "RUNNING") == running]
            if numbers:
                subprocess.run(["scancel", *options, *numbers], capture_output=True)

    def close(self) -> str:
        """Leave the jobs in Slurm."""
        jobs = [job for name, job in (self._queue or {}).items() if name in self._followed]
        self._followed.clear()
        if not jobs:
            return ""
        arrays = " ".join(sorted({job.number.partition("_")[0] for job in jobs}))
        return (
            f"{len(jobs)} jobs continue in Slurm; `make` follows them again; to stop them, so that they save:\n"
            f"  scancel --batch --signal=TERM {arrays}"
        )


def time_limit_minutes(options: str) -> float | None:
    """Return the time limit in options of sbatch; None without one, or for one in words such as UNLIMITED.

    Forms: minutes, minutes:seconds, hours:minutes:seconds, and days-hours[:minutes[:seconds]].
    """
    found = LIMIT.search(options)
    if not found:
        return None
    days, *parts = found.groups()
    first, second, third = (int(part or 0) for part in parts)
    if days or parts[-1]:
        return int(days or 0) * 1440 + first * 60 + second + third / 60
    return first + second / 60
