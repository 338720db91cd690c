"""Run tasks on a Ray cluster, one Ray task each, which starts a process on its node. CONFIG_EXECUTOR_RAY.

Ray only places. Progress and ends come from the files of the runs: a task whose node is gone leaves no exit.json, and
the driver submits it again. A node that is only cut off from Ray may still train; its claim then keeps the retry out.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from study.executors.child_process import EXIT_INTERRUPTED, StopAsked
from study.executors.claims import newest, read_holder
from study.executors.executor import EXIT_FILE, Ended, FollowedTask, Message, Started, Task, task_to_json

UNLIMITED = 1_000_000
LOOK_SECONDS = 5.0  # between two looks at the files of the running tasks
GRACE_SECONDS = 5.0  # for exit.json to appear on a shared folder after the task is gone
STOP_SECONDS = 90.0  # for all runs to save after a request to stop


def start_process() -> Callable[[list[str], str, str], None]:
    """Return the function that Ray executes on a node. It is pickled by value and imports the standard library only."""

    def start(command: list[str], folder: str, place: str) -> None:
        import os
        import signal
        import subprocess

        process = subprocess.Popen(command, cwd=folder, env=os.environ | {"RA_PLACE": place})
        try:
            process.wait()
        except BaseException:  # ray.cancel raises KeyboardInterrupt here
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise

    return start


@dataclass
class _Followed(FollowedTask):
    reference: Any = None


class RayExecutor:
    """slots: most tasks at once; 0: as many as the cluster has resources for. cpus, gpus: of one task."""

    def __init__(
        self,
        address: str,
        slots: int,
        cpus: int,
        gpus: int,
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
        self._remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(start_process())
        self._slots, self._look_at = slots, 0.0
        self._followed: dict[str, _Followed] = {}
        self._stopped: set[str] = set()

    def slots(self) -> int:
        return self._slots or UNLIMITED

    def submit(self, task: Task) -> None:
        (task.folder / EXIT_FILE).unlink(missing_ok=True)
        call = json.dumps([task_to_json(task)])
        command = [sys.executable, "-m", "study.executors.executor", call, "0"]
        reference = self._remote.remote(command, str(Path.cwd()), "ray")
        self._followed[task.name] = _Followed(task, reference=reference)

    def poll(self, seconds: float) -> Sequence[Message]:
        references = [followed.reference for followed in self._followed.values()]
        gone = []
        if references:  # none, while another driver's processes execute all runs that are left
            gone, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        look = self._clock() >= self._look_at
        if look:
            self._look_at = self._clock() + LOOK_SECONDS
        found: list[Message] = []
        for name, followed in [*self._followed.items()]:
            if followed.reference in gone:
                found += self._end(name, followed)
            elif look:
                found += self._look(followed)
        if not found:
            self._sleep(min(seconds, 1.0))
        return found

    def _look(self, followed: _Followed) -> list[Message]:
        holder = read_holder(newest(followed.task.folder)[1])
        begins = holder is not None and not holder.done
        return followed.running(holder.host if holder else "") if begins or followed.started else []

    def _end(self, name: str, followed: _Followed) -> list[Message]:
        end = followed.ended(self._clock(), GRACE_SECONDS)
        if end is None:
            return []
        if end.status == EXIT_INTERRUPTED and name not in self._stopped:
            end = Ended(name, None)  # its node was asked to end, or lost its connection to Ray
        del self._followed[name]
        return [end] if followed.started else [Started(name), end]

    def stop(self, name: str) -> None:
        if name in self._followed:
            self._stopped.add(name)
            self._ray.cancel(self._followed[name].reference)

    def close(self) -> str:
        """Stop what runs: Ray ends the tasks of a driver that is gone."""
        for name in self._followed:
            self.stop(name)
        deadline = self._clock() + STOP_SECONDS
        while self._followed and self._clock() < deadline:
            with contextlib.suppress(StopAsked):
                self.poll(1.0)
        return ""
