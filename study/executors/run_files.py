"""Files of a run that another machine reads: its last step, and exit.json at its end. Needs no torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime import files
from runtime.typed_json import to_plain
from study.executors.child_process import Event
from study.executors.executor import Ended, Message, Started, Task, TaskProgress

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
    content = asdict(ended) | {"result": to_plain(asdict(ended.result)) if ended.result else {}}
    del content["name"]
    files.write_json(folder / EXIT_FILE, content)


def read_exit(folder: Path, name: str) -> Ended | None:
    """Return the end of a task that its process wrote; None where it has not ended, or was lost."""
    try:
        content = json.loads((folder / EXIT_FILE).read_text())
        result = content.pop("result")
        return Ended(name, **content, result=Event.from_json(result) if result else None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
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
