"""The interface of executors: they place processes of `scripts.train` on a machine or on a cluster.

A task is the file of a run's plan or of a question. The driver (study.dispatch) submits tasks and polls for messages.
Progress comes from metrics.jsonl of a run, and the end of a process from its exit status; where another machine has
that, from exit.json. An executor never decides whether a run is finished: the driver reads its record.
"""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runtime import files
from runtime.files import DamagedFileError
from runtime.metrics_log import LogReader, MetricsLine
from study.executors.child_process import PATIENCE_SECONDS, Session, Slot

EXIT_FILE = "exit.json"
UNLIMITED = 1_000_000  # tasks that wait in the queue of a cluster
LOOK_SECONDS = 0.1  # between two looks at the processes of this machine


@dataclass(frozen=True)
class Task:
    """plan: the file of a run's plan or of a question, which is in a folder of its own."""

    plan: Path
    log: Path  # for the output of the process

    @property
    def folder(self) -> Path:
        """Return the folder of the task."""
        return self.plan.parent

    @property
    def name(self) -> str:
        """Return the name of the folder: the run."""
        return self.folder.name


@dataclass(frozen=True)
class Started:
    """The task began to run. where: slot, host or job."""

    name: str
    where: str = ""


@dataclass(frozen=True)
class TaskProgress:
    """A new line of a run's metrics.jsonl."""

    name: str
    line: MetricsLine


@dataclass(frozen=True)
class Ended:
    """The task is over."""

    name: str
    status: int | None  # exit status; None where it was lost with its machine
    message: str = ""  # last line of its log
    answer: Mapping[str, Any] | None = None  # to a question


@dataclass(frozen=True)
class Notice:
    """A line for the user."""

    text: str


Message = Started | TaskProgress | Ended | Notice


class Executor(Protocol):
    """Places tasks. All calls come from one thread."""

    def slots(self) -> int:
        """Return how many tasks can be submitted at once."""

    def submit(self, task: Task) -> None:
        """Place the task, or put it into the queue of the engine. A task that is there already is followed."""

    def poll(self, seconds: float) -> Sequence[Message]:
        """Return the messages of the tasks, in order. Waits at most `seconds` for the first one."""

    def stop(self, names: Sequence[str]) -> None:
        """Ask tasks to save and end. Their Ended follow."""

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
                elif isinstance(message, Notice):
                    print(message.text, flush=True)
    except BaseException:
        executor.stop([task.name for task in tasks if task.name not in ended])
        raise
    finally:
        executor.close()
    return [ended[task.name] for task in tasks]


class Followed:
    """A submitted task: what is new in its files."""

    def __init__(self, task: Task, where: str = "", joined: bool = False) -> None:
        """joined: whether the task ran before this driver, so that what it has written is news."""
        self.task, self.where, self.started = task, where, False
        self.gone_at: float | None = None  # time from which its engine does not have it
        self._metrics = LogReader(task.folder / "metrics.jsonl", at_end=not joined)
        self._log_start = task.log.stat().st_size if task.log.exists() and not joined else 0
        if not joined:
            (task.folder / EXIT_FILE).unlink(missing_ok=True)

    def progress(self, begun: bool = True) -> list[Message]:
        """Return the start of a task, once, and its new lines. begun: False: it starts with its first new line."""
        lines = self._metrics.lines()
        started = not self.started and (begun or lines)
        self.started |= bool(started)
        first: list[Message] = [Started(self.task.name, self.where)] if started else []
        return [*first, *(TaskProgress(self.task.name, line) for line in lines)]

    def ended(self, status: int | None) -> list[Message]:
        """Return the last lines and the end of a task. status: None where exit.json alone can have it."""
        end = read_exit(self.task.folder)
        status = end.get("status") if status is None else status
        return [*self.progress(), Ended(self.task.name, status, self._last_words(), end.get("answer"))]

    def lost(self, now: float, grace: float) -> bool:
        """Whether a task that is gone wrote no exit.json in `grace` seconds, in which it can still appear."""
        self.gone_at = now if self.gone_at is None else self.gone_at
        return now - self.gone_at >= grace

    def _last_words(self) -> str:
        """Return the last line with text that the process wrote to its log."""
        try:
            with self.task.log.open("rb") as file:
                file.seek(self._log_start)
                lines = file.read().decode(errors="replace").split("\n")
        except FileNotFoundError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def write_exit(folder: Path, status: int, answer: Mapping[str, Any] | None = None) -> None:
    """Write exit.json: the exit status of a process, and its answer to a question."""
    files.write_json(folder / EXIT_FILE, {"status": status, "answer": answer})


def read_exit(folder: Path) -> dict[str, Any]:
    """Return the content of exit.json; empty where the process has not ended, or was lost."""
    try:
        content = files.read_json(folder / EXIT_FILE)
    except (FileNotFoundError, DamagedFileError):
        return {}
    return content if isinstance(content, dict) else {}


class LocalExecutor:
    """Training processes of this machine."""

    def __init__(self, session: Session, slots: Sequence[Slot]) -> None:
        self.session = session
        self._free, self._count = list(slots), len(slots)
        self._running: dict[str, tuple[Followed, subprocess.Popen[bytes], Slot]] = {}

    def slots(self) -> int:
        return self._count

    def submit(self, task: Task) -> None:
        slot = self._free[0]
        followed = Followed(task, slot.name)
        process = self.session.start(task.plan, task.log, slot)
        self._free.remove(slot)
        self._running[task.name] = (followed, process, slot)

    def poll(self, seconds: float) -> Sequence[Message]:
        deadline = time.monotonic() + seconds
        while not (found := self._look()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return found

    def _look(self) -> list[Message]:
        found: list[Message] = []
        for name, (followed, process, _) in [*self._running.items()]:
            status = process.poll()
            if status is None:
                found += followed.progress()
            else:
                found += followed.ended(status)
                self._release(name)
        return found

    def _release(self, name: str) -> None:
        _, process, slot = self._running.pop(name)
        self.session.children.remove(process)
        self._free.insert(0, slot)

    def stop(self, names: Sequence[str]) -> None:
        for name, (_, process, _) in self._running.items():
            if name in names:
                process.terminate()  # nothing, where it has ended

    def close(self) -> str:
        """Stop what still runs, in case of an error, and wait for it."""
        self.stop([*self._running])
        for name, (_, process, _) in [*self._running.items()]:
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._release(name)
        return ""
