"""Run tasks on this machine, one in each slot. CONFIG_EXECUTOR_LOCAL."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from study.executors.child_process import PATIENCE_SECONDS, Child, Event, Session, Slot
from study.executors.executor import RESULTS, Ended, Message, Started, Task, TaskProgress
from study.trackers import ExperimentLoggers


@dataclass
class _Running:
    task: Task
    child: Child
    slot: Slot
    reader: threading.Thread
    loggers: ExperimentLoggers | None = None
    result: Event | None = None


class LocalExecutor:
    """Training processes of this machine. loggers: starts the experiment loggers of a run folder, or None."""

    def __init__(
        self,
        session: Session,
        slots: Sequence[Slot],
        loggers: Callable[[Path], ExperimentLoggers] | None = None,
    ) -> None:
        self.session, self._loggers = session, loggers
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
        if event.event == "started" and self._loggers:
            running.loggers = self._loggers(running.task.folder)
        if event.event in RESULTS:
            running.result = event
        self._messages.append(TaskProgress(name, event))

    def _end(self, running: _Running) -> Ended:
        child, name = running.child, running.task.name
        status = child.wait()
        self.session.children.remove(child)
        self._free.insert(0, running.slot)
        del self._running[name]
        note = running.loggers.finish() if running.loggers else None
        return Ended(name, status, child.last_words(), note or "", running.result)

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
