"""Say why a step is not reproducible (section 2.3.2): compare the traces of its conditions, and show them in one table.

A cause is named only where the conditions separate it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from numerics.describe import plain_values
from numerics.record.tensor_digest import bits_of
from numerics.repeat.alternatives import ASYNCHRONOUS_USE, alternatives
from numerics.repeat.conditions import (
    BLOCKING,
    FRESH,
    NAN,
    OBSERVED,
    ONE_THREAD,
    PLAIN,
    SYNCHRONISED,
    ZEROS,
    Condition,
)
from numerics.repeat.trace import (
    OperationEvent,
    Trace,
    TraceDifference,
    earliest_difference,
    first_difference,
    uncompared,
    without_effect,
)
from numerics.rows import TableRow

REPRODUCIBLE = "reproducible"
LIMITED = " in what could be compared"
SHARED = "two tensors in one memory"
ASYNCHRONOUS = "asynchronous memory fault"
UNOBSERVED_WRITE = "memory changed between operations"
UNINITIALISED = "uninitialised memory"
THREAD_ORDER = "order of sums among threads"
THREAD_RACE = "race between threads"
FIXED_THREADS = "reproducible with a fixed number of threads"
THREAD_RESULT = "the number of threads changes the result"
RANDOM = "random operation"
NOT_DETERMINISTIC = "non-deterministic operation"
IN_OPERATION = "memory fault or hardware fault in an operation"
TIMING = "observation removes the difference"
STATE = "state that is not restored"
PYTHON = "a Python value differs between repetitions"
PATH = "the step takes another path"
PROCESS = "differs between processes"
UNNAMED = "cause not separated"

HARMLESS = (THREAD_ORDER, FIXED_THREADS)  # rounding alone, with a fixed number of threads none
RANDOM_NAMES = re.compile(r"bernoulli|dropout|rand|normal_|uniform_|multinomial|exponential_|poisson")
TRY = {  # in front of the alternatives to the operation
    SHARED: (
        "clone() one of them where they are created; check custom allocators, from_numpy and ctypes buffers",
    ),
    ASYNCHRONOUS: ASYNCHRONOUS_USE,
    UNOBSERVED_WRITE: (
        "wait for asynchronous copies and communication before the memory is used",
        *ASYNCHRONOUS_USE,
    ),
    UNINITIALISED: (
        *alternatives("empty"),
        "torch.utils.deterministic.fill_uninitialized_memory with deterministic algorithms",
    ),
    TIMING: ASYNCHRONOUS_USE,
    STATE: ("give everything that the step changes as state; fix the data",),
    PYTHON: ("give the object that holds the value as state; a constant instead of a clock",),
    PROCESS: (
        "equal PYTHONHASHSEED, CUBLAS_WORKSPACE_CONFIG and threads in each process (numerics.seed_all)",
    ),
    IN_OPERATION: ("make stress: a faulty device fails there as well",),
    UNNAMED: ("make stress",),
    FIXED_THREADS: ("the same OMP_NUM_THREADS on both sides of a comparison",),
    THREAD_ORDER: ("OMP_NUM_THREADS=1 for comparisons",),
}
BLOCK = 2048  # bytes of a block of memory on Ascend devices
Capture = Callable[[str, int], tuple[list[Tensor], list[Tensor]]]


@dataclass(frozen=True)
class Pattern:
    """How two outputs of one operation differ. change: rounding, NaN, one bit, or other."""

    change: str
    regular: bool  # one bit, NaN or one run of elements: no order of sums does so
    text: str


def pattern(good: Tensor, bad: Tensor, inputs: Sequence[Tensor] = ()) -> Pattern | None:
    """Compare two tensors of one shape and dtype; None where they are equal to the bit.

    Rounding: the largest difference is at most eps max|good| sqrt(terms), for sums of as many terms as an input has
    elements (the errors of a sum of n terms grow with sqrt(n) where they are independent).
    """
    before, after = (bits_of(side.detach().cpu()).numpy() for side in (good, bad))
    where = np.flatnonzero(before != after)
    if not len(where):
        return None
    first, last = int(where[0]), int(where[-1])
    single_run = len(where) > 1 and len(where) > 0.9 * (last - first + 1)
    size = before.itemsize
    text = f"{len(where)} of {before.size} elements, {first} to {last}"
    if single_run and (first * size) % BLOCK == 0 and ((last + 1 - first) * size) % BLOCK == 0:
        text += f" (a multiple of {BLOCK} bytes)"
    flipped = {int(bits) & (1 << 8 * size) - 1 for bits in before[where] ^ after[where]}
    if len(flipped) == 1 and (bit := flipped.pop()) & (bit - 1) == 0:
        return Pattern("bit", True, f"{text}: bit {bit.bit_length() - 1} is flipped")
    if not good.is_floating_point():
        return Pattern("other", single_run, text)
    a, b = (plain_values(side).detach().cpu().double().flatten() for side in (good, bad))
    finite = a.isfinite() & b.isfinite()
    if not bool(finite[where].any()):
        return Pattern("NaN", True, f"{text}: NaN or infinity")
    error, scale = float((a - b)[finite].abs().max()), float(a[finite].abs().max())
    eps = max(torch.finfo(one.dtype).eps for one in (good, *inputs) if one.is_floating_point())
    terms = max((value.numel() for value in inputs), default=1)
    text += f": largest difference {error:.3g} of {scale:.3g}"
    if bool(finite.all()) and error <= eps * scale * math.sqrt(max(terms, 1)):
        return Pattern("rounding", False, f"{text}, rounding")
    return Pattern("other", single_run, text)


@dataclass(frozen=True)
class RepeatCause:
    """A cause. operation: the first that differs; None where unknown."""

    name: str
    difference: str = ""
    operation: OperationEvent | None = None
    pattern: Pattern | None = None

    @property
    def harmless(self) -> bool:
        return self.name in HARMLESS

    @property
    def suggestions(self) -> list[str]:
        more = alternatives(self.operation.name) if self.operation and self.name != UNINITIALISED else []
        return [*TRY.get(self.name, ()), *more]

    def row(self) -> TableRow:
        title = self.operation.title if self.operation else ""
        shown = self.pattern.text if self.pattern else ""
        return TableRow(title, self.difference, shown, units=math.nan, evidence=self.name)


@dataclass(frozen=True)
class Repetition:
    """A repeated step: its conditions, the causes, the most certain first, and notes."""

    conditions: Mapping[str, Condition]
    causes: list[RepeatCause]
    operations: int
    notes: list[str] = field(default_factory=list)

    @property
    def is_fault(self) -> bool:
        return any(not cause.harmless for cause in self.causes)

    @property
    def verdict(self) -> str:
        """Return the first cause, or reproducible; with a reservation where not all was compared."""
        limited = not self.is_fault and bool(self.uncompared())
        return (self.causes[0].name if self.causes else REPRODUCIBLE) + LIMITED * limited

    def uncompared(self) -> list[str]:
        """Return the operations and results that could not be compared, with the reason."""
        traces = [trace for condition in self.conditions.values() for trace in condition.traces]
        return list(dict.fromkeys(f"{each.name}: {each.reason}" for each in uncompared(traces)))

    def rows(self) -> list[TableRow]:
        """Return the causes, then the conditions with their repetitions and different results."""
        conditions = [
            TableRow(
                name,
                f"threads: {one.threads}",
                f"repetitions: {len(one.traces)}",
                results_text(one),
                units=math.nan,
            )
            for name, one in self.conditions.items()
        ]
        return [*(cause.row() for cause in self.causes), *conditions]


def results_text(condition: Condition) -> str:
    """Return what the repetitions of a condition gave: equal, or the number of different results."""
    if condition.traces and all(trace.error for trace in condition.traces):
        return f"raises {condition.traces[0].error}"
    if len(condition.traces) < 2:
        return ""
    return "equal" if condition.distinct == 1 else f"{condition.distinct} different"


class Evidence:
    """Compare the traces of each condition. capture: repeats the step and keeps the tensors of one operation."""

    def __init__(self, found: Mapping[str, Condition], capture: Capture | None = None) -> None:
        self.found, self.capture = found, capture
        self.causes: list[RepeatCause] = []
        self.queue = [name for name in (SYNCHRONISED, BLOCKING) if name in found]

    def collect(self) -> list[RepeatCause]:
        self._overwritten()
        self._uninitialised()
        if self._differs(PLAIN) or self._differs(OBSERVED):
            if not self.causes:
                self._one_process()
        elif not self.causes:
            self._between_processes()
        self._threads()
        return self.causes

    def _differs(self, name: str) -> bool | None:
        """Return whether the traces of a condition differ among each other; None where it did not run."""
        return self.found[name].distinct > 1 if name in self.found else None

    def _add(self, name: str, difference: str = "", *more: Any) -> None:
        self.causes.append(RepeatCause(name, difference, *more))

    def _overwritten(self) -> None:
        """Memory whose content changed although no operation wrote it shows itself in one trace."""
        where = {
            name: [trace for trace in one.traces if trace.overwritten] for name, one in self.found.items()
        }
        if not any(where.values()):
            return
        trace = next(traces[0] for traces in where.values() if traces)
        first = trace.overwritten[0]
        text = f"input {first.input} changed since it was written, and no observed operation wrote it"
        shared = overlaps(self.found)
        if shared:
            self._add(SHARED, f"{text}; {shared[0]}", trace.events[first.reader])
        elif self.queue and not any(where[name] for name in self.queue) and where[OBSERVED]:
            self._add(ASYNCHRONOUS, text, trace.events[first.reader])
        else:
            self._add(UNOBSERVED_WRITE, text, trace.events[first.reader])

    def _uninitialised(self) -> None:
        """Two contents of new memory give two results, first at an input that torch.empty returned."""
        if ZEROS not in self.found or NAN not in self.found:
            return
        one, other = self.found[ZEROS].traces[0], self.found[NAN].traces[0]
        difference = (
            None if (one.results, one.error) == (other.results, other.error) else first_difference(one, other)
        )
        if difference is None or difference.kind != "input":
            return
        reader, position = one.events[difference.event], difference.position
        if position in reader.unset:
            self._add(UNINITIALISED, f"input {position} is memory of torch.empty", reader)

    def _one_process(self) -> None:
        """The traces of one process differ."""
        if not self._differs(OBSERVED):
            self._add(ASYNCHRONOUS if self.queue else TIMING, "observed repetitions are equal")
            return
        traces = self.found[OBSERVED].traces
        difference, number = earliest_difference(traces)
        event = event_of(difference, traces[number])
        shape = self._pattern(OBSERVED, OBSERVED, difference)
        text = difference_text(difference, traces[number])
        named = {"operations": PATH, "scalar": PYTHON, "input": STATE}
        if self.queue and not any(self._differs(name) for name in self.queue):
            self._add(ASYNCHRONOUS, text, event, shape)
        elif difference.kind in named:
            self._add(named[difference.kind], text, event)
        elif event is None or difference.kind != "output" or not event.knows_inputs:
            self._add(UNNAMED, text, event)
        elif self._differs(ONE_THREAD) is False:
            rounding = shape is not None and shape.change == "rounding"
            self._add(THREAD_ORDER if rounding else THREAD_RACE, text, event, shape)
        elif RANDOM_NAMES.search(event.name):
            self._add(RANDOM, text, event, shape)
        elif shape is None:
            self._add(UNNAMED, f"{text}; it did not recur when its values were captured", event)
        else:
            self._add(IN_OPERATION if shape.regular else NOT_DETERMINISTIC, text, event, shape)

    def _between_processes(self) -> None:
        reference = self.found[OBSERVED].traces[0]
        others = self.found[FRESH].traces if FRESH in self.found else []
        for trace in others:
            if difference := first_difference(reference, trace):
                self._add(PROCESS, difference_text(difference, trace), event_of(difference, trace))
                return

    def _threads(self) -> None:
        """One thread and several threads are reproducible each, and differ."""
        if ONE_THREAD not in self.found or self._differs(ONE_THREAD) or self._differs(OBSERVED):
            return
        one = self.found[ONE_THREAD].traces[0]
        difference = first_difference(self.found[OBSERVED].traces[0], one)
        if difference is None or one.overwritten:
            return
        shape = self._pattern(OBSERVED, ONE_THREAD, difference)
        rounding = shape is not None and shape.change == "rounding"
        name = FIXED_THREADS if rounding else THREAD_RESULT
        self._add(name, difference_text(difference, one), event_of(difference, one), shape)

    def _pattern(self, one: str, other: str, difference: TraceDifference) -> Pattern | None:
        """Capture the operation under both conditions until its outputs differ. None where they do not."""
        if self.capture is None or difference.kind != "output":
            return None
        inputs, reference = self.capture(one, difference.event)
        for _ in range(max(len(self.found[other].traces), 2)):
            _, outputs = self.capture(other, difference.event)
            for good, bad in zip(reference, outputs, strict=False):
                if (
                    good.shape == bad.shape
                    and good.dtype == bad.dtype
                    and (shape := pattern(good, bad, inputs))
                ):
                    return shape
        return None


def event_of(difference: TraceDifference, trace: Trace) -> OperationEvent | None:
    return trace.events[difference.event] if 0 <= difference.event < len(trace.events) else None


def difference_text(difference: TraceDifference, trace: Trace) -> str:
    """Return which value of the operation differs first, and what is known of its inputs."""
    event = event_of(difference, trace)
    if event is None or difference.kind in ("scalar", "operations", "results", "error"):
        return difference.text
    if difference.kind == "output":
        known = "equal" if event.knows_inputs else "unknown"
        return f"output {difference.position}, inputs {known}"
    writer = event.writers[difference.position] if difference.position < len(event.writers) else -1
    origin = trace.events[writer].title if writer >= 0 else "before the step"
    return f"input {difference.position}, written by {origin}"


def overlaps(found: Mapping[str, Condition]) -> list[str]:
    """Return the pairs of live tensors that share bytes and are not views of one another."""
    pairs = [overlap for one in found.values() for trace in one.traces for overlap in trace.overlaps]
    texts = [f"{each.first} and {each.second} share {each.shared_bytes} bytes" for each in pairs]
    return list(dict.fromkeys(texts))


def repetition_notes(found: Mapping[str, Condition], causes: Sequence[RepeatCause]) -> list[str]:
    """Return errors and values that are not finite, and differences that reach no result."""
    plain = found[PLAIN].traces
    errors = [trace.error for name in (PLAIN, OBSERVED) for trace in found[name].traces if trace.error]
    notes = [f"the step ended with {error}" for error in dict.fromkeys(errors)]
    broken = dict.fromkeys(result for trace in plain for result in trace.not_finite)
    for result in list(broken)[:3]:
        count = sum(result in trace.not_finite for trace in plain)
        notes.append(f"{result} is not finite (NaN or infinity) in {count} of {len(plain)} repetitions")
    first, *others = found[OBSERVED].traces
    idle = dict.fromkeys(event.title for trace in others for event in without_effect(first, trace))
    notes += [f"{title}: an output differs that no result depends on" for title in idle]
    if SHARED not in [cause.name for cause in causes]:
        notes += [f"overlapping live tensors: {text}; no content changed" for text in overlaps(found)[:3]]
    return notes
