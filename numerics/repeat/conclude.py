"""Conclude from the traces of a step why it is not reproducible, by the tree of section 2.3.2.

Every sentence of evidence is a count or a comparison of traces. A cause is named only where the conditions separate it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

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
from numerics.repeat.corruption import ALL_NAN, BIT, OTHER, ROUNDING, SCATTERED, Corruption, analyse, dense
from numerics.repeat.trace import (
    OperationEvent,
    TraceDifference,
    earliest_difference,
    first_difference,
    named,
    without_effect,
)

REPRODUCIBLE = "reproducible"
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
UNKNOWN_INPUTS = "Whether the inputs of this operation were equal is unknown."

RANDOM_NAMES = re.compile(r"bernoulli|dropout|rand|normal_|uniform_|multinomial|exponential_|poisson")
MOST_RESULTS = 3  # in notes
Capture = Callable[[str, int], tuple[list[Tensor], list[Tensor]]]


@dataclass(frozen=True)
class RepeatCause:
    """A cause. harmless: whether it changes rounding alone. operation: the first that differs; None where unknown."""

    name: str
    evidence: tuple[str, ...]
    meaning: str
    section: str
    harmless: bool = False
    operation: OperationEvent | None = None
    corruption: Corruption | None = None
    suggestions: tuple[str, ...] = ()


@dataclass
class Conclusion:
    """The findings, the most certain first, and notes."""

    findings: list[RepeatCause] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.findings[0].name if self.findings else REPRODUCIBLE

    @property
    def is_fault(self) -> bool:
        return any(not finding.harmless for finding in self.findings)


class Tree:
    """Walk the tree over the traces of each condition. capture: keeps the tensors of one operation."""

    def __init__(self, found: Mapping[str, Condition], capture: Capture | None = None) -> None:
        self.found, self.capture = found, capture
        self.reference = found[OBSERVED].traces[0]
        self.conclusion = Conclusion()

    def walk(self) -> Conclusion:
        self._overwritten()
        self._uninitialised()
        if self._differs(PLAIN) or self._differs(OBSERVED):
            if not self.conclusion.findings:
                self._one_process()
        elif not self.conclusion.findings:
            self._between_processes()
        self._threads()
        self._errors()
        return self.conclusion

    # -- counts

    def _differs(self, name: str) -> bool | None:
        """Return whether the traces of a condition differ among each other; None where it did not run."""
        return self.found[name].distinct > 1 if name in self.found else None

    def _count(self, name: str) -> str:
        condition = self.found[name]
        differing = condition.distinct
        result = "equal" if differing == 1 else f"{differing} different results"
        return f"{name}: {len(condition.traces)} repetitions, {result}"

    def _counts(self, *names: str) -> tuple[str, ...]:
        return tuple(self._count(name) for name in names if name in self.found)

    def _add(self, name: str, evidence: tuple[str, ...], meaning: str, section: str, **more: Any) -> None:
        self.conclusion.findings.append(RepeatCause(name, evidence, meaning, section, **more))

    # -- the tree

    def _overwritten(self) -> None:
        """Memory whose content changed although no operation wrote it shows itself in one trace."""
        where = {
            name: [trace for trace in condition.traces if trace.overwritten]
            for name, condition in self.found.items()
        }
        overlaps = list(
            dict.fromkeys(overlap for c in self.found.values() for t in c.traces for overlap in t.overlaps)
        )
        texts = [f"{each.first} and {each.second} share {each.shared_bytes} bytes" for each in overlaps]
        if not any(where.values()):
            self.conclusion.notes += [
                f"overlapping live tensors: {text}; no content changed" for text in texts[:3]
            ]
            return
        trace = next(traces[0] for traces in where.values() if traces)
        first = trace.overwritten[0]
        reader = trace.events[first.reader]
        wrote = (
            f"{trace.events[first.writer].title} wrote" if first.writer >= 0 else "existed before the step"
        )
        kind = (
            f"input {first.input} of {reader.title} is not what {wrote}"
            if first.writer >= 0
            else (f"input {first.input} of {reader.title} {wrote} and changed since its first use")
        )
        evidence = [f"{kind}; no observed operation wrote it between"]
        observed = [each for each in where if each != PLAIN]
        evidence += [
            f"{each}: in {len(where[each])} of {len(self.found[each].traces)} repetitions"
            for each in observed
        ]
        queue = [each for each in (SYNCHRONISED, BLOCKING) if each in where]
        if overlaps:
            self._add(
                SHARED, (*evidence, *texts[:3]),
                "A write to one of the tensors changes the other one.", "2.3.2.1", operation=reader,
                suggestions=("clone() one of them where they are created; check custom allocators, from_numpy and "
                             "ctypes buffers",),
            )  # fmt: skip
        elif queue and not any(where[each] for each in queue) and where[OBSERVED]:
            self._asynchronous(tuple(evidence), reader)
        else:
            self._add(
                UNOBSERVED_WRITE, tuple(evidence),
                "Something that is not a torch operation of this thread wrote the memory: a kernel still in the queue, "
                "another thread, a custom extension, numpy or a copy that was not waited for.", "2.3.2.1",
                operation=reader,
                suggestions=("wait for asynchronous copies and communication before the memory is used",
                             *ASYNCHRONOUS_USE),
            )  # fmt: skip

    def _asynchronous(
        self, evidence: tuple[str, ...], event: OperationEvent | None, shape: Corruption | None = None
    ) -> None:
        self._add(
            ASYNCHRONOUS, evidence,
            "The fault vanishes when each operation waits for the one before: memory of a queue or of communication "
            "is used before it is ready, or reused too early.", "2.3.2.1", operation=event, corruption=shape,
            suggestions=ASYNCHRONOUS_USE,
        )  # fmt: skip

    def _uninitialised(self) -> None:
        if ZEROS not in self.found or NAN not in self.found:
            return
        one, other = self.found[ZEROS].traces[0], self.found[NAN].traces[0]
        if one.results == other.results and one.error == other.error:
            return
        difference = first_difference(one, other)
        if difference is None or difference.kind != "input":
            return
        reader, position = one.events[difference.event], difference.position
        if position not in reader.unset:
            return
        writer = reader.writers[position]
        last = f"; the last operation that wrote to it is {one.events[writer].title}" if writer >= 0 else ""
        evidence = [
            f"results differ between {ZEROS} and {NAN}",
            f"input {position} of {reader.title} is the first that differs: memory of torch.empty{last}",
        ]
        evidence += [
            f"with {name}: {trace.error}" for name, trace in ((ZEROS, one), (NAN, other)) if trace.error
        ]
        self._add(
            UNINITIALISED, tuple(evidence),
            "The step reads elements of new memory that nothing has written. It holds earlier tensors.",
            "2.3.2.1", operation=reader,
            suggestions=(*alternatives("empty"), "torch.utils.deterministic.fill_uninitialized_memory with "
                         "torch.use_deterministic_algorithms(True) fills new memory with NaN"),
        )  # fmt: skip

    def _one_process(self) -> None:
        """The traces of one process differ."""
        observed = self._differs(OBSERVED)
        queue = [name for name in (SYNCHRONISED, BLOCKING) if name in self.found]
        counts = self._counts(PLAIN, OBSERVED, ONE_THREAD, *queue)
        if not observed:
            if queue:
                self._asynchronous((*counts, "the repetitions that are observed are equal"), None)
                return
            self._add(
                TIMING, counts, "Observing the operations changes their timing, and the difference vanishes: threads "
                "or memory that depend on timing. torch.compile, which observation turns off, is another possibility.",
                "2.3.2.1", suggestions=ASYNCHRONOUS_USE,
            )  # fmt: skip
            return
        traces = self.found[OBSERVED].traces
        difference, number = earliest_difference(traces)
        events = traces[number].events
        event = events[difference.event] if 0 <= difference.event < len(events) else None
        shape = self._shape(OBSERVED, OBSERVED, difference)
        evidence = (*counts, *named(difference, event, events))
        if shape:
            evidence = (*evidence, str(shape))
        if queue and not any(self._differs(name) for name in queue):
            self._asynchronous(evidence, event, shape)
        elif difference.kind == "operations":
            self._add(PATH, (*evidence, difference.text), "Python code decides otherwise: by a random number, a set's "
                      "order, the clock, or a value of the device.", "2.3.2.2", operation=event)  # fmt: skip
        elif difference.kind == "scalar":
            self._add(
                PYTHON, evidence, "State that is not restored, a clock or a counter: Python computed another number "
                "for an operation whose tensors are equal.", "2.3.2.2", operation=event,
                suggestions=("keep the value in an object with state_dict and give that as state, draw it from random "
                             "or torch, or use a constant instead of a clock",),
            )  # fmt: skip
        elif difference.kind == "input":
            self._add(
                STATE, evidence, "Every observed operation before has equal results, so the input comes from outside: "
                "state that restore() does not know, data, or code that no operation of torch runs.", "2.3.2.2",
                operation=event, suggestions=("give everything that the step changes as state; fix the data",),
            )  # fmt: skip
        elif event is None or difference.kind != "output" or not event.knows_inputs:
            meaning = (
                UNKNOWN_INPUTS
                if event and not event.knows_inputs
                else "The operations agree, the results do not."
            )
            self._add(UNNAMED, (*evidence, difference.text), meaning, "2.3.2.2", operation=event)
        elif self._differs(ONE_THREAD) is False:
            harmless = bool(shape and shape.change == ROUNDING)
            meaning = (
                "Threads add in the order in which they finish. One thread is reproducible, and the difference is "
                "rounding." if harmless else "Threads write the same memory in an order that changes. One thread is "
                "reproducible. The difference is larger than rounding, or its values were not captured."
            )  # fmt: skip
            self._add(
                THREAD_ORDER if harmless else THREAD_RACE, evidence, meaning, "2.3.2.2", harmless=harmless,
                operation=event, corruption=shape,
                suggestions=(*alternatives(event.name), "OMP_NUM_THREADS=1 for comparisons"),
            )  # fmt: skip
        else:
            self._operation(event, shape, evidence)

    def _operation(self, event: OperationEvent, shape: Corruption | None, evidence: tuple[str, ...]) -> None:
        """An operation with equal inputs has unequal outputs, in each condition."""
        more: dict[str, Any] = {"operation": event, "corruption": shape}
        suggestions = tuple(alternatives(event.name))
        if RANDOM_NAMES.search(event.name):
            self._add(RANDOM, evidence, "It draws random numbers from a generator that was not restored.",
                      "2.3.2.2", suggestions=suggestions, **more)  # fmt: skip
        elif shape is None:
            self._add(UNNAMED, evidence, "The same inputs gave other outputs. The difference did not recur when its "
                      "values were captured, so its size is unknown: operation, memory or hardware.",
                      "2.3.2.2", suggestions=(*suggestions, "make stress"), **more)  # fmt: skip
        elif shape.change == ROUNDING:
            self._add(NOT_DETERMINISTIC, evidence, "The same inputs gave outputs that differ by rounding: it adds in "
                      "an order that changes.", "2.3.2.2", suggestions=suggestions, **more)  # fmt: skip
        elif shape.place != SCATTERED or shape.change in (BIT, ALL_NAN):
            self._add(
                IN_OPERATION, evidence, "The same inputs gave outputs that differ by more than rounding, in a regular "
                "pattern. Synchronisation does not help, so the fault is within the operation or in the hardware.",
                "2.3.2.1 and 2.3.2.3",
                suggestions=("make stress: a faulty device fails there as well",
                             "compute the operation on the CPU or by small operations", *suggestions), **more,
            )  # fmt: skip
        else:
            self._add(
                NOT_DETERMINISTIC, evidence, "The same inputs gave outputs that differ by more than rounding, at "
                "scattered elements: an order of writes that changes, or memory within the operation.", "2.3.2.2",
                suggestions=(*suggestions, "make stress"), **more,
            )  # fmt: skip

    def _between_processes(self) -> None:
        if FRESH not in self.found:
            return
        others = self.found[FRESH].traces
        found = [(first_difference(self.reference, trace), trace) for trace in others]
        differing = [(difference, trace) for difference, trace in found if difference]
        if not differing:
            return
        difference, trace = differing[0]
        event = trace.events[difference.event] if 0 <= difference.event < len(trace.events) else None
        self._add(
            PROCESS,
            (*self._counts(PLAIN, OBSERVED),
             f"{len(differing)} of {len(others)} fresh processes differ from the first process",
             *named(difference, event, trace.events)),
            "One process is reproducible, another process computes something else: another environment, hash seed, "
            "kernel choice, alignment of memory, or memory that was not written.", "2.3.2.2", operation=event,
            suggestions=("PYTHONHASHSEED, CUBLAS_WORKSPACE_CONFIG and the thread count equal in each process "
                         "(numerics.seed_all)", *(alternatives(event.name) if event else ())),
        )  # fmt: skip

    def _threads(self) -> None:
        """One thread and several threads are reproducible each, and differ."""
        if ONE_THREAD not in self.found or self._differs(ONE_THREAD) or self._differs(OBSERVED):
            return
        one = self.found[ONE_THREAD].traces[0]
        difference = first_difference(self.reference, one)
        if difference is None or one.overwritten:
            return
        event = one.events[difference.event] if 0 <= difference.event < len(one.events) else None
        shape = self._shape(OBSERVED, ONE_THREAD, difference)
        many = self.found[OBSERVED].threads
        evidence = (
            *self._counts(OBSERVED, ONE_THREAD),
            f"1 thread and {many} threads differ",
            *named(difference, event, one.events),
            *([str(shape)] if shape else []),
        )
        if shape and shape.change == ROUNDING:
            self._add(
                FIXED_THREADS, evidence, "Each number of threads is reproducible. Another number splits sums "
                "otherwise, and the difference is rounding.", "2.3.2.2", harmless=True, operation=event,
                corruption=shape, suggestions=("the same OMP_NUM_THREADS on both sides of a comparison",),
            )  # fmt: skip
        else:
            self._add(
                THREAD_RESULT, evidence, "The number of threads changes the result by more than "
                "rounding, or the values were not captured.", "2.3.2.2", operation=event, corruption=shape,
                suggestions=tuple(alternatives(event.name)) if event else (),
            )  # fmt: skip

    def _errors(self) -> None:
        for name in (PLAIN, OBSERVED):
            traces = self.found[name].traces
            errors = dict.fromkeys(trace.error for trace in traces if trace.error)
            texts = tuple(f"{name}: the step ended with {error}" for error in errors)
            self.conclusion.notes += texts
        traces = self.found[PLAIN].traces
        results = dict.fromkeys(result for trace in traces for result in trace.not_finite)
        for result in list(results)[:MOST_RESULTS]:
            count = sum(result in trace.not_finite for trace in traces)
            self.conclusion.notes.append(
                f"the result {result} is not finite (NaN or infinity) in {count} of {len(traces)} repetitions"
            )
        first, *others = self.found[OBSERVED].traces
        idle = dict.fromkeys(event.title for trace in others for event in without_effect(first, trace))
        self.conclusion.notes += [f"{title}: an output differs that no result depends on" for title in idle]

    def _shape(self, one: str, other: str, difference: TraceDifference) -> Corruption | None:
        """Capture the operation under both conditions until its outputs differ. None where they do not."""
        if self.capture is None or difference.kind != "output":
            return None
        inputs, reference = self.capture(one, difference.event)
        terms = max((value.numel() for value in inputs), default=1)
        for _ in range(max(len(self.found[other].traces), 2)):
            _, outputs = self.capture(other, difference.event)
            for good, bad in zip(map(dense, reference), map(dense, outputs), strict=False):
                if good.shape == bad.shape and good.dtype == bad.dtype:
                    shape = analyse(good, bad, terms, inputs)
                    if shape.count:  # which of them is right is unknown
                        return shape if shape.change != OTHER else analyse(bad, good, terms, inputs)
        return None
