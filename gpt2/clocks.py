"""Time a run: wall clocks by activity, and the clock of step times. Exactly one wall clock runs at any time.

`train` counts training steps. `compile` counts model set-up, compiling and the first steps of each process, which warm
the allocator and the kernels. `data` counts waiting for the next batch. Time in which the process was stopped is in no
clock. No count and no verdict depends on them.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

UNEVEN = 1.5  # 90th percentile of the step times over their median
UNEVEN_STEPS = 20  # fewest steps for a note
UNEVEN_TIMES = "uneven step times"  # beginning of the note
NAMES = ("train", "compile", "evaluate", "checkpoint", "data")
TICK_SECONDS = 0.25
STOPPED_SECONDS = 3.0  # between two ticks: no thread of the process ran


class RunningTime:
    """Wall seconds without those in which the process was stopped: by SIGSTOP, Ctrl-Z, a frozen container.

    A thread ticks. A longer gap between two ticks is left out, except one tick.
    """

    def __init__(
        self,
        tick: float = TICK_SECONDS,
        stopped: float = STOPPED_SECONDS,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._now, self._tick, self._stopped = now, tick, stopped
        self._lock = threading.Lock()
        self._last, self._left_out = now(), 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._tick)
            self()

    def __call__(self) -> float:
        with self._lock:
            now = self._now()
            if now - self._last > self._stopped:
                self._left_out += now - self._last - self._tick
            self._last = now
            return now - self._left_out


@functools.cache
def running_time() -> RunningTime:
    """Return the clock of this process."""
    return RunningTime()


class Clocks:
    """Seconds by name. `synchronise` waits for the device, so that its work is timed on the clock that started it."""

    def __init__(
        self,
        seconds: Mapping[str, float] | None = None,
        synchronise: Callable[[], None] = lambda: None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._seconds = dict.fromkeys(NAMES, 0.0) | {k: float(v) for k, v in (seconds or {}).items()}
        self._synchronise = synchronise
        self._now = now or running_time()
        self._running = "compile"
        self._since = self._now()

    def _settle(self) -> None:
        now = self._now()
        self._seconds[self._running] += now - self._since
        self._since = now

    def switch(self, name: str, synchronise: bool = True) -> None:
        """Switch to clock `name`. Without `synchronise` the device may still execute earlier work."""
        if name not in self._seconds:
            raise KeyError(f"unknown clock {name!r}; the clocks are {', '.join(NAMES)}")
        if synchronise:
            self._synchronise()
        self._settle()
        self._running = name

    @contextmanager
    def on(self, name: str, synchronise: bool = True) -> Iterator[None]:
        """Time the block on clock `name`, then switch back to the previous clock."""
        before = self._running
        self.switch(name, synchronise)
        try:
            yield
        finally:
            self.switch(before, synchronise)

    def read(self, name: str) -> float:
        """Return the seconds on clock `name`."""
        self._settle()
        return self._seconds[name]

    def total(self) -> float:
        """Return the wall seconds of all processes of the run."""
        return sum(self.seconds().values())

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of an earlier process of the run."""
        for name, spent in seconds.items():
            self._seconds[name] += spent

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all clocks, for the record and the checkpoint."""
        self._settle()
        return dict(self._seconds)


def device_synchroniser(device: str) -> Callable[[], None]:
    """Return a function that waits for the device; it does nothing on a CPU."""
    if device.startswith("cpu"):
        return lambda: None
    import torch

    synchronise: Callable[[], None] = torch.get_device_module(device).synchronize
    return synchronise


class StepTimer(Protocol):
    """Times steps from mark to mark."""

    def mark(self) -> Any:
        """Return the present place in the work of the device or the host."""

    def passed(self, begin: Any, end: Any) -> float | None:
        """Return the seconds between two marks; None while the device has not reached the second."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks. May wait for the device."""


class ClockTimer:
    """Times steps by a clock of the host."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.mark = clock

    def passed(self, begin: float, end: float) -> float | None:
        return end - begin

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class EventTimer:
    """Times steps by events in the queue of an accelerator, without a wait between steps."""

    def __init__(self, device: str) -> None:
        self.device = device

    def mark(self) -> torch.Event:
        import torch

        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def passed(self, begin: torch.Event, end: torch.Event) -> float | None:
        return begin.elapsed_time(end) / 1000 if end.query() else None

    def seconds(self, begin: torch.Event, end: torch.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1000


def step_timer(device: str, threads: int, ranks: int = 1) -> StepTimer:
    """Return the timer of steps on a device.

    On a CPU it is the CPU time of this process, all threads, over the number of threads: other processes hardly change
    it, and without them it agrees with wall time. Of several ranks on CPUs it is running time: the time in which a rank
    waits counts. Elsewhere it is the time between events in the device's queue; on a device without such events,
    running time after the device finished its queue.
    """
    if device.startswith("cpu"):
        return ClockTimer(running_time() if ranks > 1 else lambda: time.process_time() / threads)
    synchronise = device_synchroniser(device)

    def synchronised() -> float:
        synchronise()
        return running_time()()

    timer = EventTimer(device)
    try:
        begin, end = timer.mark(), timer.mark()
        timer.seconds(begin, end)
    except Exception:  # the backend has no events, or events without times; its error is of any type
        return ClockTimer(synchronised)
    return timer


def unevenness(step_seconds: Sequence[float]) -> str | None:
    """Return a note if step times are as uneven as on a busy machine, else None."""
    if len(step_seconds) < UNEVEN_STEPS:
        return None
    tenths = statistics.quantiles(step_seconds, n=10, method="inclusive")
    median, slow = tenths[4], tenths[8]
    if slow <= UNEVEN * median:
        return None
    return (
        f"{UNEVEN_TIMES}: 10 % of the steps took {slow:.3g} s or more ({slow / median:.1f} times the median of "
        f"{median:.3g} s). The machine was probably busy; do not use this run's speed. Losses are unaffected"
    )
