"""Repeat a step under conditions that each exclude one kind of cause, section 2.3.2 of the guide."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from numerics.errors import NumericsError
from numerics.repeat.observe import OperationObserver
from numerics.repeat.trace import Trace, first_difference
from numerics.replayed_step import ReplayedStep

PLAIN, OBSERVED, ONE_THREAD = "not observed", "observed", "one thread"
SYNCHRONISED, BLOCKING, FRESH = "synchronised", "blocking launches", "fresh processes"
ZEROS, NAN = "new memory filled with zeros", "new memory filled with NaN"
MOST_ERROR = 200  # characters of an error
Progress = Callable[[str, int, int], None]


@dataclass
class Condition:
    """The traces of one condition. threads: of the CPU. captured: of the first difference, see `Conditions.capture`."""

    name: str
    threads: int
    traces: list[Trace] = field(default_factory=list)

    @property
    def distinct(self) -> int:
        """Return the number of different traces."""
        found: list[Trace] = []
        for trace in self.traces:
            if all(first_difference(other, trace) for other in found):
                found.append(trace)
        return len(found)


def run_once(step: ReplayedStep, observer: OperationObserver | None) -> Trace:
    """Run the step from its state. An error of the step ends its trace."""
    step.restore()
    error, returned = "", None
    if observer is None:
        observer = OperationObserver()  # hashes the results alone
        try:
            returned = step.function()
        except ArithmeticError:  # not finite: the gradients are results
            pass
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:MOST_ERROR]
    else:
        try:
            with observer.running():
                returned = step.function()
        except ArithmeticError:  # not finite: the gradients are results
            pass
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:MOST_ERROR]
    if not error:
        observer.note_results(step.results(returned))
    return observer.trace(error)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def available_threads() -> int:
    """Return the CPUs of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Conditions:
    """Run a step under conditions. many: threads of the CPU in all conditions but one.

    synchronise: waits for all queued work; by default that of the accelerator, None where there is none.
    """

    def __init__(
        self,
        step: ReplayedStep,
        times: int,
        many: int,
        synchronise: Callable[[], object] | None,
        progress: Progress | None = None,
    ) -> None:
        self.step, self.times, self.many, self.synchronise = step, times, many, synchronise
        self.progress = progress or (lambda name, done, total: None)
        self.found: dict[str, Condition] = {}

    def run(self) -> dict[str, Condition]:
        """Run every condition that can differ on this device. NumericsError for a step that always raises."""
        self._repeat(PLAIN, self.many, self.times, lambda: None)
        if all(trace.error for trace in self.found[PLAIN].traces):
            error = self.found[PLAIN].traces[0].error.partition("\n")[0]
            raise NumericsError(
                f"the step raises {error} in each of {self.times} repetitions, so it has no results; fix: run the step "
                "once without repeat and correct the error"
            )
        self._repeat(OBSERVED, self.many, self.times, self.observer)
        if self.many > 1:
            self._repeat(ONE_THREAD, 1, self.times, self.observer)
        if self.synchronise:
            self._repeat(SYNCHRONISED, self.many, self.times, self.synchronised)
        for name, fill in ((ZEROS, "zeros"), (NAN, "NaN")):  # last: it may make the step fail
            self._repeat(name, self.many, 1, lambda fill=fill: OperationObserver(self.step.places, fill=fill))  # type: ignore[misc]
        return self.found

    def observer(self) -> OperationObserver:
        return OperationObserver(self.step.places)

    def synchronised(self) -> OperationObserver:
        return OperationObserver(self.step.places, synchronise=self.synchronise)

    def _repeat(
        self, name: str, count: int, times: int, make: Callable[[], OperationObserver | None]
    ) -> None:
        condition = self.found[name] = Condition(name, count)
        with threads(count):
            for number in range(times):
                self.progress(name, number, times)
                condition.traces.append(run_once(self.step, make()))

    def capture(self, name: str, event: int) -> tuple[list[Tensor], list[Tensor]]:
        """Repeat the step under a condition. Return the inputs and outputs of an operation."""
        condition = self.found[name]
        kept = OperationObserver(self.step.places, capture=event)
        if name == SYNCHRONISED:
            kept.synchronise = self.synchronise
        kept.fill = {ZEROS: "zeros", NAN: "NaN"}.get(name, "")
        with threads(condition.threads):
            run_once(self.step, kept)
        return kept.captured
