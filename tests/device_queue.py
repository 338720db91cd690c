"""An accelerator whose queue is behind the host, and the events in it."""

from __future__ import annotations

import math


class Queue:
    """An accelerator that works behind the host. Times are in milliseconds of its own."""

    def __init__(self) -> None:
        self.queued = self.reached = 0.0
        self.waits: list[str] = []

    def launch(self, milliseconds: float) -> None:
        self.queued += milliseconds

    def wait(self, who: str = "device") -> None:
        self.waits.append(who)
        self.reached = self.queued

    def event(self, device: str, enable_timing: bool = False) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, queue: Queue) -> None:
        self.queue, self.at = queue, math.nan

    def record(self) -> None:
        self.at = self.queue.queued

    def query(self) -> bool:
        return self.queue.reached >= self.at

    def synchronize(self) -> None:
        self.queue.waits.append("event")
        self.queue.reached = max(self.queue.reached, self.at)

    def elapsed_time(self, other: Event) -> float:
        if not (self.query() and other.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return other.at - self.at
