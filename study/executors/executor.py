"""The interface of executors: they place training processes on a machine or on a cluster.

A task is one call of `scripts.train`: a run, step times for the plan, or a question about the machine or the arms. The
driver (study.runner.dispatch) submits tasks and polls for messages. An executor never decides whether a run is
finished: the driver reads its record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from study.executors.child_process import Event

RESULTS = ("timing", "answer")  # events that are the result of a task


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

    message: the last line of its log. note: for the user. result: its "timing" or "answer" event.
    """

    name: str
    status: int | None
    message: str = ""
    note: str = ""
    result: Event | None = None


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
