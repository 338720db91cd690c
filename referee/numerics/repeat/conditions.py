"""Repeat a step under conditions that each exclude one kind of cause, section 2.3.2 of the guide."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from referee.errors import NumericsError, described
from referee.numerics.repeat.observe import OperationObserver
from referee.numerics.repeat.trace import Trace, first_difference
from referee.numerics.replayed_step import ReplayedStep

PLAIN, OBSERVED, ONE_THREAD, SYNCHRONISED = "not observed", "observed", "one thread", "synchronised"
ZEROS, NAN = "new memory filled with zeros", "new memory filled with NaN"
FRESH, FRESH_PROCESSES = "fresh processes", 2
MOST_ERROR = 200  # characters of an error


@dataclass
class Condition:
    """The traces of one condition."""

    threads: int  # of the CPU
    make: Callable[..., OperationObserver | None] = lambda: None  # None: the step is not observed
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
    """Run the step from its state. An error of the step ends its trace. observer: None hashes the results alone."""
    step.restore()
    error, returned = "", None
    with observer.running() if observer else contextlib.nullcontext():
        try:
            returned = step.function()
        except ArithmeticError:  # not finite: the gradients are results
            pass
        except Exception as raised:
            error = described(raised)[:MOST_ERROR]
    observer = observer or OperationObserver()
    if not error:
        observer.note_results(step.results(returned))
    return observer.trace(error)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Within the block, torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Conditions:
    """Run a step under conditions. many: threads of the CPU in all conditions but one.

    synchronise: waits for all queued work; None where there is none. progress: receives each condition.
    """

    def __init__(
        self,
        step: ReplayedStep,
        times: int,
        many: int,
        synchronise: Callable[[], object] | None,
        progress: Callable[[str], object] = lambda name: None,
    ) -> None:
        self.step, self.times, self.many, self.progress = step, times, many, progress
        observer = functools.partial(OperationObserver, step.places)
        self.found = {PLAIN: Condition(many), OBSERVED: Condition(many, observer)}
        if many > 1:
            self.found[ONE_THREAD] = Condition(1, observer)
        if synchronise:
            self.found[SYNCHRONISED] = Condition(many, functools.partial(observer, synchronise=synchronise))
        for name, fill in ((ZEROS, 0.0), (NAN, float("nan"))):  # last: it may make the step fail
            self.found[name] = Condition(many, functools.partial(observer, fill=fill))

    def run(self) -> None:
        """Run every condition that can differ on this device. NumericsError for a step that always raises."""
        for name, condition in self.found.items():
            self.progress(name)
            with threads(condition.threads):
                for _ in range(1 if name in (ZEROS, NAN) else self.times):
                    condition.traces.append(run_once(self.step, condition.make()))
            if name == PLAIN and all(trace.error for trace in condition.traces):
                raise NumericsError(
                    f"the step raises {condition.traces[0].error} in each of {self.times} repetitions, so it has no "
                    "results; fix: run the step once without repeat and correct the error"
                )

    def capture(self, name: str, event: int) -> tuple[list[Tensor], list[Tensor]]:
        """Repeat the step under an observed condition. Return the inputs and outputs of an operation."""
        condition = self.found[name]
        observer = condition.make(capture=event)
        with threads(condition.threads):
            run_once(self.step, observer)
        return observer.captured if observer else ([], [])

    def run_fresh(self, command: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
        """Repeat the step in fresh processes. command: runs `child` with two more arguments, file and threads."""
        condition = self.found[FRESH] = Condition(self.many)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.pickle"
            for _ in range(FRESH_PROCESSES):
                self.progress(FRESH)
                done = subprocess.run(
                    [*command, str(file), str(self.many)],
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if done.returncode:
                    reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
                    raise NumericsError(
                        f"a fresh process failed: {reason}; fix: run {' '.join(command)} to see the error"
                    )
                condition.traces.append(pickle.loads(file.read_bytes()))  # written by this program just now


def child(step: ReplayedStep, file: str, count: str) -> None:
    """Repeat the step in this fresh process and write its trace."""
    with threads(int(count)):
        run_once(step, None)  # caches that the first call builds
        trace = run_once(step, OperationObserver(step.places))
    Path(file).write_bytes(pickle.dumps(trace))
