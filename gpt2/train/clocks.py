"""Wall clocks of a run, and the clock of step times. One wall clock runs at a time, so every second is on one only.

`train` counts training steps. `compile` counts model set-up, compiling and the first steps of each process, which warm
the allocator and the kernels. `data` counts waiting for the next batch. No count and no verdict depends on them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

UNEVEN = 1.5  # 90th percentile of the step times over their median
UNEVEN_STEPS = 20  # fewer say nothing
NAMES = ("train", "compile", "evaluate", "checkpoint", "data")


class Clocks:
    """Seconds by name. `synchronise` waits for the device, so that queued work lands on the clock that queued it."""

    def __init__(
        self,
        seconds: Mapping[str, float] | None = None,
        synchronise: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._seconds = dict.fromkeys(NAMES, 0.0) | {k: float(v) for k, v in (seconds or {}).items()}
        self._synchronise = synchronise
        self._now = now
        self._running = "compile"
        self._since = now()

    def _settle(self) -> None:
        now = self._now()
        self._seconds[self._running] += now - self._since
        self._since = now

    def switch(self, name: str, synchronise: bool = True) -> None:
        """From now on seconds go to `name`. Without `synchronise` the device may still be busy with older work."""
        if name not in self._seconds:
            raise KeyError(f"no clock {name!r}; there are {', '.join(NAMES)}")
        if synchronise:
            self._synchronise()
        self._settle()
        self._running = name

    @contextmanager
    def on(self, name: str, synchronise: bool = True) -> Iterator[None]:
        """Charge the block to `name`, then go on with the clock that ran before."""
        before = self._running
        self.switch(name, synchronise)
        try:
            yield
        finally:
            self.switch(before, synchronise)

    def read(self, name: str) -> float:
        """Seconds on `name` up to now."""
        self._settle()
        return self._seconds[name]

    def total(self) -> float:
        """Wall seconds of the run up to now, of all its processes."""
        return sum(self.seconds().values())

    def seconds(self) -> dict[str, float]:
        """All clocks up to now, for the record and the checkpoint."""
        self._settle()
        return dict(self._seconds)


def work_clock(device_type: str, threads: int, synchronise: Callable[[], None]) -> Callable[[], float]:
    """Return the clock that step times are read from, in seconds.

    On a CPU it is the CPU time of this process, all threads, over the number of threads: other processes hardly change
    it, and without them it agrees with wall time. Elsewhere it is wall time after the device finished its queue.
    """
    if device_type == "cpu":
        return lambda: time.process_time() / threads

    def synchronised() -> float:
        synchronise()
        return time.perf_counter()

    return synchronised


def unevenness(step_seconds: Sequence[float]) -> str | None:
    """A note where the seconds of single steps spread as they do on a machine that also does something else."""
    if len(step_seconds) < UNEVEN_STEPS:
        return None
    tenths = statistics.quantiles(step_seconds, n=10, method="inclusive")
    median, slow = tenths[4], tenths[8]
    if slow <= UNEVEN * median:
        return None
    return (
        f"step times spread widely: one in ten took {slow:.3g} s or more, {slow / median:.1f} times the median of "
        f"{median:.3g} s. Was the machine busy with something else? Its speed is then not to be trusted"
    )
