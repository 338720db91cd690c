"""The present state of a study as JSON, for the page that watches it. Reads the records and changes nothing."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2.system.progress import duration
from pages.components import palette_index
from scripts.status.table import RunStatus, read_status, seconds_left

MOST_POINTS = 400  # of a curve
MOST_CURVES = 40  # on the page: more lines are not readable


@dataclass
class LiveCurve:
    """The training loss of a run, read as its file grows. points: [iteration, mean loss of `width` steps]."""

    path: Path
    points: list[list[float]] = field(default_factory=list)
    memory_bytes: int = 0
    width: int = 1
    offset: int = 0
    pending: list[list[float]] = field(default_factory=list)

    def update(self) -> None:
        """Read the lines that were added. A shorter file is a new one, and is read from its start."""
        try:
            size = self.path.stat().st_size
            if size < self.offset:
                self.__init__(self.path)  # type: ignore[misc]
            with self.path.open("rb") as file:
                file.seek(self.offset)
                added = file.read(size - self.offset)
        except OSError:
            return
        complete = added.rfind(b"\n") + 1
        self.offset += complete
        for line in added[:complete].split(b"\n"):
            self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            event = json.loads(line) if line else None
        except ValueError:
            return
        if not isinstance(event, dict) or event.get("event") != "train":
            return
        iteration, loss = event.get("iteration"), event.get("loss")
        memory = event.get("memory_bytes")
        self.memory_bytes = max(self.memory_bytes, memory if isinstance(memory, int) else 0)
        if not isinstance(iteration, int) or not isinstance(loss, int | float):
            return
        known = self.points or self.pending
        if known and iteration <= (self.pending or self.points)[-1][0]:  # resumed from a checkpoint
            self.points = [point for point in self.points if point[0] < iteration]
            self.pending = []
        self.pending.append([iteration, loss])
        if len(self.pending) >= self.width:
            self.points.append(_mean(self.pending))
            self.pending = []
        if len(self.points) >= 2 * MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_mean([first, second]) for first, second in pairs]
            self.width *= 2


def _mean(points: list[list[float]]) -> list[float]:
    return [points[-1][0], sum(loss for _, loss in points) / len(points)]


class Live:
    """A study's state, at most as old as `seconds`."""

    def __init__(self, study_dir: Path, seconds: float = 2.0) -> None:
        self.study_dir, self.seconds = study_dir, seconds
        self.curves: dict[str, LiveCurve] = {}
        self.read_at, self.content = float("-inf"), b""

    def json(self) -> bytes:
        """Return the state as JSON. PlanFileError for a damaged plan."""
        if time.monotonic() - self.read_at > self.seconds:
            self.content = json.dumps(self.state(), allow_nan=False).encode()
            self.read_at = time.monotonic()
        return self.content

    def state(self) -> dict[str, Any]:
        runs, plan = read_status(self.study_dir)
        counts = Counter(run.state for run in runs)
        left = seconds_left(runs, plan)
        variants = list(dict.fromkeys(run.variant for run in runs))
        drawn = sorted(runs, key=lambda run: (run.state != "running", -run.done))
        shown = {run.name for run in drawn if run.state != "waiting"}
        shown = {run.name for run in drawn[:MOST_CURVES]} & shown
        return {
            "study": self.study_dir.name,
            "summary": ", ".join(f"{count} {state}" for state, count in counts.items()),
            "left": f"about {duration(left)} left" if left is not None and counts["running"] else "",
            "report": (self.study_dir / "report.html").is_file(),
            "left_out": sum(run.state != "waiting" for run in runs) - len(shown),
            "runs": [self._run(run, palette_index(run.variant, variants), run.name in shown) for run in runs],
        }

    def _run(self, run: RunStatus, color: int, drawn: bool) -> dict[str, Any]:
        curve = self.curves.setdefault(
            run.name, LiveCurve(self.study_dir / "runs" / run.name / "metrics.jsonl")
        )
        if drawn:
            curve.update()
        _, _, done, loss, speed, host, place = run.cells
        memory = f"{curve.memory_bytes / 2**30:.2f} GiB" if curve.memory_bytes else ""
        cells = [run.name, run.state, done, loss, speed, memory, host, place]
        points = curve.points if drawn else []
        finite = [point for point in points if abs(point[1]) < float("inf")]
        return {"cells": cells, "reason": run.reason, "color": color, "curve": finite}
