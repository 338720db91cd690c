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

from runtime.errors import UserError
from study.executors.child_process import EXIT_INTERRUPTED, StopAsked
from study.executors.executor import UNLIMITED, Followed, Message, Notice, Task

RETRIES = 3  # of a task whose node is lost
LOOK_SECONDS = 5.0  # between two looks at the files of the tasks
UNPLACED_SECONDS = 30.0  # without a start of any task, before a message to the user
STOP_SECONDS = 90.0  # for all runs to save after a request to stop
# With a session of its own it keeps Ray from killing a process whose driver is gone: the process saves.
VARIABLES = {"RAY_kill_child_processes_on_worker_exit": "false"}


def start_process() -> Callable[[list[str], str, str], int]:
    """Return the function that Ray executes on a node. It is pickled by value and imports the standard library only."""

    def start(command: list[str], folder: str, log: str) -> int:
        import os
        import signal
        import subprocess

        words, env = [*command, "--parent", str(os.getpid())], os.environ | {"RA_PLACE": "ray"}
        with open(log, "ab") as out:
            process = subprocess.Popen(
                words, cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True
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

    def __init__(self, address: str, slots: int, resources: Mapping[str, Any]) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise UserError("Ray is not installed; fix: .venv/bin/pip install ray") from None
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError) as error:
            text = " ".join(f"no Ray cluster at CONFIG_RAY_ADDRESS={address}: {error}".split())
            raise UserError(f"{text}; fix: ray start --head") from None
        options = {"max_retries": RETRIES, "runtime_env": {"env_vars": VARIABLES}}
        self._ray, self._remote = ray, ray.remote(**options, **resources)(start_process())
        self._slots, self._resources, self._look_at = slots, resources, 0.0
        self._followed: dict[str, tuple[Followed, Any]] = {}  # with the reference of its Ray task
        self._unplaced_at: float | None = time.monotonic() + UNPLACED_SECONDS

    def slots(self) -> int:
        return self._slots or UNLIMITED

    def submit(self, task: Task) -> None:
        command = [sys.executable, "-m", "scripts.train", str(task.plan.absolute())]
        followed, log = Followed(task, "ray"), str(task.log.absolute())
        self._followed[task.name] = (followed, self._remote.remote(command, str(Path.cwd()), log))

    def poll(self, seconds: float) -> Sequence[Message]:
        references = [reference for _, reference in self._followed.values()]
        gone = self._ray.wait(references, num_returns=len(references), timeout=0)[0] if references else []
        now, found = time.monotonic(), list[Message]()
        look = now >= self._look_at
        self._look_at = now + LOOK_SECONDS if look else self._look_at
        for name, (followed, reference) in [*self._followed.items()]:
            if reference in gone:
                del self._followed[name]
                found += followed.ended(self._status(reference))
            elif look:
                found += followed.progress(begun=False)
        self._unplaced_at = None if found else self._unplaced_at
        if self._unplaced_at and now >= self._unplaced_at:
            self._unplaced_at, has = None, self._ray.cluster_resources()
            wanted = ", ".join(f"{name}={amount}" for name, amount in self._resources.items())
            found += [Notice(f"Ray has placed no task yet: each needs {wanted}; it has {has}")]
        if not found:
            time.sleep(min(seconds, 1.0))
        return found

    def _status(self, reference: Any) -> int | None:
        """Return the exit status of a task; None where it was lost, or its node was asked to end."""
        try:
            status = int(self._ray.get(reference))
        except self._ray.exceptions.RayError:  # cancelled, or lost more often than Ray repeats it
            return None
        return None if status == EXIT_INTERRUPTED else status

    def stop(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._followed:
                self._ray.cancel(self._followed[name][1])

    def close(self) -> str:
        """Stop what runs: Ray ends the tasks of a driver that is gone."""
        self.stop([*self._followed])
        deadline = time.monotonic() + STOP_SECONDS
        while self._followed and time.monotonic() < deadline:
            with contextlib.suppress(StopAsked):
                self.poll(1.0)
        return ""
