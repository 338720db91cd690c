"""Run tasks on a Ray cluster, one Ray task each, which starts a process on its node. CONFIG_EXECUTOR_RAY.

Ray places the tasks and repeats one whose node is gone. A process of a node that is only cut off from Ray may still
train: the fence of the run (runtime.attempt) keeps it from writing. Progress comes from the files of the runs.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.attempt import read_attempt
from runtime.errors import UserError
from study.executors.child_process import EXIT_INTERRUPTED, StopAsked
from study.executors.executor import Followed, Message, Notice, Task

UNLIMITED = 1_000_000
RETRIES = 3  # of a task whose node is lost
LOOK_SECONDS = 5.0  # between two looks at the files of the running tasks
UNPLACED_SECONDS = 30.0  # without a start of any task, before a message to the user
STOP_SECONDS = 90.0  # for all runs to save after a request to stop


def start_process() -> Callable[[list[str], str, str], int]:
    """Return the function that Ray executes on a node. It is pickled by value and imports the standard library only."""

    def start(command: list[str], folder: str, log: str) -> int:
        import os
        import signal
        import subprocess

        with open(log, "ab") as output:
            process = subprocess.Popen(
                [*command, "--parent", str(os.getpid())],
                cwd=folder,
                env=os.environ | {"RA_PLACE": "ray"},
                stdout=output,
                stderr=output,
            )
        try:
            return process.wait()
        except BaseException:  # ray.cancel raises KeyboardInterrupt here
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise

    return start


class RayExecutor:
    """slots: most tasks at once; 0: as many as the cluster has resources for. resources: of one task, as Ray's."""

    def __init__(
        self,
        address: str,
        slots: int,
        resources: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise UserError("Ray is not installed; fix: .venv/bin/pip install ray") from None
        self._ray, self._clock, self._sleep = ray, clock, sleep
        if not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, ValueError) as error:
                reason = " ".join(f"{error}".split())
                raise UserError(
                    f"no Ray cluster at CONFIG_RAY_ADDRESS={address}: {reason}; fix: ray start --head"
                ) from None
        self._remote = ray.remote(max_retries=RETRIES, **resources)(start_process())
        self._slots, self._resources, self._look_at = slots, resources, 0.0
        self._followed: dict[
            str, tuple[Followed, Any, str]
        ] = {}  # with its reference, and the attempt before it
        self._stopped: set[str] = set()
        self._unplaced_at: float | None = clock() + UNPLACED_SECONDS

    def slots(self) -> int:
        return self._slots or UNLIMITED

    def submit(self, task: Task) -> None:
        command = [sys.executable, "-m", "scripts.train", str(task.plan.absolute())]
        before = read_attempt(task.folder)
        followed = Followed(task)
        reference = self._remote.remote(command, str(Path.cwd()), str(task.log.absolute()))
        self._followed[task.name] = (followed, reference, before.id if before else "")

    def poll(self, seconds: float) -> Sequence[Message]:
        references = [reference for _, reference, _ in self._followed.values()]
        gone = self._ray.wait(references, num_returns=len(references), timeout=0)[0] if references else []
        look = self._clock() >= self._look_at
        if look:
            self._look_at = self._clock() + LOOK_SECONDS
        found: list[Message] = []
        for name, (followed, reference, before) in [*self._followed.items()]:
            if reference in gone:
                del self._followed[name]
                found += followed.ended(self._status(name, reference))
            elif look and (attempt := read_attempt(followed.task.folder)) and attempt.id != before:
                followed.where = attempt.host
                found += followed.progress()
        found += self._unplaced(bool(found))
        if not found:
            self._sleep(min(seconds, 1.0))
        return found

    def _status(self, name: str, reference: Any) -> int | None:
        """Return the exit status of a task; None where it was lost, or its node was asked to end."""
        try:
            status = int(self._ray.get(reference))
        except self._ray.exceptions.RayError:
            status = EXIT_INTERRUPTED  # cancelled, or lost more often than Ray repeats it
        return None if status == EXIT_INTERRUPTED and name not in self._stopped else status

    def _unplaced(self, news: bool) -> list[Message]:
        """Say once what the cluster has, where no task begins in UNPLACED_SECONDS."""
        if news:
            self._unplaced_at = None
        if self._unplaced_at is None or self._clock() < self._unplaced_at:
            return []
        self._unplaced_at = None
        wanted = ", ".join(f"{name}={amount}" for name, amount in self._resources.items())
        return [
            Notice(f"Ray has placed no task yet: each needs {wanted}; it has {self._ray.cluster_resources()}")
        ]

    def stop(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._followed:
                self._stopped.add(name)
                self._ray.cancel(self._followed[name][1])

    def close(self) -> str:
        """Stop what runs: Ray ends the tasks of a driver that is gone."""
        self.stop([*self._followed])
        deadline = self._clock() + STOP_SECONDS
        while self._followed and self._clock() < deadline:
            with contextlib.suppress(StopAsked):
                self.poll(1.0)
        return ""
