"""Files of a run that another machine reads: its last step, and exit.json at its end. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpt2.system import files
from study.executors.child_process import Event

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


@dataclass(frozen=True)
class Exit:
    """The end of a training process. message: last line of its log. result: its "timing" or "resolved" event."""

    status: int
    message: str = ""
    note: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def event(self) -> Event | None:
        return Event.from_json(self.result) if self.result else None


def write_exit(folder: Path, end: Exit) -> None:
    files.write_json(folder / EXIT_FILE, asdict(end))


def read_exit(folder: Path) -> Exit | None:
    """Return the end that the process wrote; None where it has not ended, or was lost."""
    try:
        return Exit(**json.loads((folder / EXIT_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
