"""The interface of executors: they place training processes on a machine or on a cluster.

A task is one call of `scripts.train`: a run, or a question (study.planner). The driver (study.dispatch) submits tasks
and polls for messages. An executor never decides whether a run is finished: the driver reads its record.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from runtime import files, run_plan
from runtime.signals import end_with_parent
from study.executors.child_process import (
    EXIT_INTERRUPTED,
    PATIENCE_SECONDS,
    PLACE,
    Child,
    Event,
    Session,
    Slot,
    StopAsked,
)
from study.trackers import ExperimentLoggers


@dataclass(frozen=True)
class Task:
    """arguments: of `scripts.train`. folder: for files of the task; it exists. log: file for its other output."""

    name: str
    arguments: tuple[str, ...]
    folder: Path
    log: Path


@dataclass(frozen=True)
class Started:
    """The task began to run. where: slot, host or job."""

    name: str
    where: str = ""


@dataclass(frozen=True)
class TaskProgress:
    """The last event of a running task."""

    name: str
    event: Event


@dataclass(frozen=True)
class Ended:
    """The task is over. status: its exit status; None where it was lost with its machine.

    message: the last line of its log. note: for the user. answer: to a question.
    """

    name: str
    status: int | None
    message: str = ""
    note: str = ""
    answer: Mapping[str, Any] | None = None


Message = Started | TaskProgress | Ended


class Executor(Protocol):
    """Places tasks. All calls come from one thread."""

    def slots(self) -> int:
        """Return how many tasks can be submitted at once."""

    def submit(self, task: Task) -> None:
        """Place the task, or put it into the queue of the engine. A task that is there already is followed."""

    def poll(self, seconds: float) -> Sequence[Message]:
        """Return the messages of the tasks, in order. Waits at most `seconds` for the first one."""

    def stop(self, name: str) -> None:
        """Ask a task to save and end. Its Ended follows."""

    def close(self) -> str:
        """Release the executor after the last poll. Returns a note on tasks that continue without it, or ""."""


def run_tasks(
    executor: Executor, tasks: Sequence[Task], waiting_for: Callable[[], None] = lambda: None
) -> list[Ended]:
    """Run the tasks, as many at once as slots, to their end; return their ends in order. Stops them after an error.

    waiting_for: called about once a second.
    """
    ended: dict[str, Ended] = {}
    waiting = deque(tasks)
    try:
        while len(ended) < len(tasks):
            while waiting and len(tasks) - len(waiting) - len(ended) < executor.slots():
                executor.submit(waiting.popleft())
            waiting_for()
            for message in executor.poll(1.0):
                if isinstance(message, Ended):
                    ended[message.name] = message
    except BaseException:
        for task in tasks:
            if task.name not in ended:
                executor.stop(task.name)
        raise
    finally:
        executor.close()
    return [ended[task.name] for task in tasks]


EXIT_FILE = "exit.json"
TAIL_BYTES = 8192  # of metrics.jsonl, more than ten lines


def last_step(run_dir: Path) -> Event | None:
    """Return the last training step in metrics.jsonl; None before the first one."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # the last one is incomplete, or empty
    except OSError:
        return None
    for line in reversed(lines):
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict) and content.get("event") == "train":
            return Event.from_json(content)
    return None


def write_exit(folder: Path, ended: Ended) -> None:
    """Write exit.json: the end without the name of the task."""
    content = asdict(ended)
    del content["name"]
    files.write_json(folder / EXIT_FILE, content)


def read_exit(folder: Path, name: str) -> Ended | None:
    """Return the end of a task that its process wrote; None where it has not ended, or was lost."""
    try:
        content = json.loads((folder / EXIT_FILE).read_text())
        return Ended(name, **content)
    except (OSError, ValueError, TypeError):
        return None


@dataclass
class FollowedTask:
    """A task on another machine. gone_at: time from which its engine does not have it."""

    task: Task
    started: bool = False
    gone_at: float | None = None

    def running(self, where: str) -> list[Message]:
        """Return the start, once, and the last step. where: host or job."""
        found: list[Message] = [] if self.started else [Started(self.task.name, where)]
        self.started = True
        step = last_step(self.task.folder)
        return [*found, TaskProgress(self.task.name, step)] if step else found

    def ended(self, now: float, grace: float) -> Ended | None:
        """Return the end of a task that is gone; None for `grace` seconds, in which exit.json can still appear."""
        end = read_exit(self.task.folder, self.task.name)
        if end is None:
            self.gone_at = now if self.gone_at is None else self.gone_at
            if now - self.gone_at < grace:
                return None
        return end or Ended(self.task.name, None)


@dataclass
class _Running:
    task: Task
    child: Child
    slot: Slot
    reader: threading.Thread
    loggers: ExperimentLoggers | None = None
    answer: Mapping[str, Any] | None = None


class LocalExecutor:
    """Training processes of this machine."""

    def __init__(self, session: Session, slots: Sequence[Slot]) -> None:
        self.session = session
        self._free, self._count = list(slots), len(slots)
        self._running: dict[str, _Running] = {}
        # events of all processes; an exception is one of a reader, None the end of a process
        self._events: queue.Queue[tuple[str, Event | Exception | None]] = queue.Queue()
        self._messages: list[Message] = []

    def slots(self) -> int:
        return self._count

    def submit(self, task: Task) -> None:
        slot = self._free[0]
        child = self.session.start(task.arguments, task.log, slot)
        self._free.remove(slot)
        reader = threading.Thread(target=self._read, args=(task.name, child), daemon=True)
        self._running[task.name] = _Running(task, child, slot, reader)
        reader.start()
        self._messages.append(Started(task.name, slot.name))

    def _read(self, name: str, child: Child) -> None:
        """Pass the events of a process on until it closes its output."""
        try:
            for event in child.events():
                self._events.put((name, event))
            self._events.put((name, None))
        except Exception as error:
            self._events.put((name, error))

    def poll(self, seconds: float) -> Sequence[Message]:
        if not self._messages:
            try:
                self._take(*self._events.get(timeout=seconds))
                while True:
                    self._take(*self._events.get_nowait())
            except queue.Empty:
                pass
        found, self._messages = self._messages, []
        return found

    def _take(self, name: str, event: Event | Exception | None) -> None:
        running = self._running[name]
        if isinstance(event, Exception):
            raise event
        if event is None:
            self._messages.append(self._end(running))
            return
        if event.event == "started":
            plan = run_plan.load(running.task.folder / run_plan.FILE)
            running.loggers = ExperimentLoggers(running.task.folder, plan.settings.tracking)
        if event.event == "answer":
            running.answer = event.answer
        self._messages.append(TaskProgress(name, event))

    def _end(self, running: _Running) -> Ended:
        child, name = running.child, running.task.name
        status = child.wait()
        self.session.children.remove(child)
        self._free.insert(0, running.slot)
        del self._running[name]
        note = running.loggers.finish() if running.loggers else None
        return Ended(name, status, child.last_words(), note or "", running.answer)

    def stop(self, name: str) -> None:
        if name in self._running:
            self._running[name].child.terminate()

    def close(self) -> str:
        """Stop what still runs, in case of an error, and wait for it."""
        for running in self._running.values():
            running.child.terminate()
        for running in [*self._running.values()]:
            try:
                running.child.process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                running.child.kill()
            running.reader.join()
            self._end(running)
        return ""


# Execute one task on a node of a cluster, and write exit.json at its end.
#
# python -m study.executors.executor TASKS INDEX     TASKS: a JSON file of tasks, or the JSON itself
#
# SIGTERM: the run saves and ends. SIGUSR1, which Slurm sends before a time limit: the same, and the job is put back
# into the queue, where it continues from its checkpoint.


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
    session = Session()
    requeue = Requeue(session)
    executor = LocalExecutor(session, [Slot("")])
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
