"""Repeat a step, and say why it is not reproducible (section 2.3.2), in one table.

found = repeat_step(step, state=(model, optimizer), times=8)
print(found.verdict)

A cause is named only where the conditions separate it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from referee.errors import NumericsError
from referee.numerics.describe import plain_values
from referee.numerics.record.tensor_statistics import bits_of
from referee.numerics.repeat.conditions import (
    FRESH,
    NAN,
    OBSERVED,
    ONE_THREAD,
    PLAIN,
    SYNCHRONISED,
    ZEROS,
    Condition,
    Conditions,
)
from referee.numerics.repeat.trace import OperationEvent, Trace, TraceDifference, first_difference
from referee.numerics.replayed_step import ReplayedStep
from referee.numerics.rows import TableRow, text_table

REPRODUCIBLE, LIMITED = "reproducible", " in what could be compared"
ASYNCHRONOUS = "asynchronous memory fault"
UNOBSERVED_WRITE = "memory changed between operations"
UNINITIALISED = "uninitialised memory"
THREADS = "the number of threads changes the result"
NOT_DETERMINISTIC = "non-deterministic operation"
IN_OPERATION = "memory fault or hardware fault in an operation"
TIMING = "observation removes the difference"
STATE = "state that is not restored"
PYTHON = "a Python value differs between repetitions"
PATH = "the step takes another path"
PROCESS = "differs between processes"
UNNAMED = "cause not separated"

MOST_TIMES = 1000
MOST_LISTED = 3  # operations or results that could not be compared, and notes of a kind
BLOCK = 2048  # bytes of a block of memory on Ascend devices
ALGORITHMS = "torch.use_deterministic_algorithms(True)"
# operation -> deterministic alternative (section 2.3.2.2); of torch's list of deterministic algorithms
ALTERNATIVES = {
    r"c10d|all_?reduce|reduce_scatter|all_?gather": (
        "HCCL_DETERMINISTIC=true (Ascend), NCCL_ALGO=Ring and NCCL_PROTO=Simple (NVIDIA); no overlap with computation"
    ),
    r"index_add|scatter|index_reduce": f"{ALGORITHMS}; or sort the indices and use torch.segment_reduce",
    r"embedding": f"{ALGORITHMS}; or compute the embedding as a product with one-hot rows",
    r"scaled_dot_product|flash_attention|efficient_attention": "sdpa_kernel(SDPBackend.MATH) of torch.nn.attention",
    r"convolution|cudnn|miopen": "torch.backends.cudnn.deterministic = True, and benchmark = False",
    r"\b(mm|addmm|bmm|baddbmm|matmul|linear|dot|mv|addmv)\b|_scaled_mm|addbmm": (
        "CUBLAS_WORKSPACE_CONFIG=:4096:8 before the process starts (NVIDIA), CLOSE_MATMUL_K_SHIFT=1 (Ascend)"
    ),
    r"bernoulli|dropout|rand|normal_|uniform_|multinomial|exponential_|poisson": (
        "seed every generator (referee.numerics.seed_all); or draw on the CPU and move the numbers to the device"
    ),
    r"fused_ada|fused_sgd": "the optimizer with fused=False, foreach=False",
}


def alternative(operation: str) -> str:
    """Return what makes an operation deterministic. operation: as torch names it: "aten.index_add_.default"."""
    general = f"{ALGORITHMS}; or compute the operation on the CPU, or by small operations"
    return next((text for form, text in ALTERNATIVES.items() if re.search(form, operation.lower())), general)


@dataclass(frozen=True)
class Pattern:
    """How two outputs of one operation differ."""

    text: str
    rounding: bool = False
    regular: bool = False  # one bit, NaN or one run of elements: no order of sums does so


def pattern(good: Tensor, bad: Tensor, inputs: Sequence[Tensor] = ()) -> Pattern | None:
    """Compare two tensors of one shape and dtype; None where they are equal to the bit.

    Rounding: the largest difference is at most eps max|good| sqrt(terms), for sums of as many terms as an input has
    elements (the errors of a sum of n terms grow with sqrt(n) where they are independent).
    """
    before, after = (bits_of(side.detach().cpu()).numpy() for side in (good, bad))
    where = np.flatnonzero(before != after)
    if not len(where):
        return None
    first, last, size = int(where[0]), int(where[-1]), before.itemsize
    single_run = len(where) > 1 and len(where) > 0.9 * (last - first + 1)
    text = f"{len(where)} of {before.size} elements, {first} to {last}"
    if single_run and (first * size) % BLOCK == 0 and ((last + 1 - first) * size) % BLOCK == 0:
        text += f" (a multiple of {BLOCK} bytes)"
    if good.is_floating_point():
        a, b = (plain_values(side).detach().cpu().double().flatten() for side in (good, bad))
        is_finite = a.isfinite() & b.isfinite()
        if not bool(is_finite[where].any()):
            return Pattern(f"{text}: NaN or infinity", regular=True)
        error, scale = float((a - b)[is_finite].abs().max()), float(a[is_finite].abs().max())
        eps = max(torch.finfo(value.dtype).eps for value in (good, *inputs) if value.is_floating_point())
        terms = max((value.numel() for value in inputs), default=1)
        text += f": largest difference {error:.3g} of {scale:.3g}"
        if bool(is_finite.all()) and error <= eps * scale * math.sqrt(max(terms, 1)):
            return Pattern(f"{text}, rounding", rounding=True)
    flipped = {int(bits) & (1 << 8 * size) - 1 for bits in before[where] ^ after[where]}
    if len(flipped) == 1 and (bit := flipped.pop()) & (bit - 1) == 0:
        return Pattern(f"{text}, bit {bit.bit_length() - 1} is flipped", regular=True)
    return Pattern(text, regular=single_run)


@dataclass(frozen=True)
class RepeatCause:
    """A cause. operation: the first that differs; None where unknown."""

    name: str
    difference: str = ""
    operation: OperationEvent | None = None
    pattern: Pattern | None = None

    @property
    def harmless(self) -> bool:
        """Return whether a fixed number of threads makes the step reproducible, and the rest is rounding."""
        return self.name == THREADS and self.pattern is not None and self.pattern.rounding

    @property
    def alternative(self) -> str:
        """Return what makes the operation deterministic; "" where it is not the cause."""
        named = self.operation and self.name in (NOT_DETERMINISTIC, IN_OPERATION, THREADS)
        return alternative(self.operation.name) if self.operation and named else ""

    def row(self) -> TableRow:
        title = self.operation.title if self.operation else ""
        shown = self.pattern.text if self.pattern else ""
        return TableRow(title, self.difference, shown, units=math.nan, evidence=self.name)


@dataclass(frozen=True)
class Repetition:
    """A repeated step: its conditions, and the causes, the most certain first."""

    conditions: Mapping[str, Condition]
    causes: list[RepeatCause]

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
        return list(dict.fromkeys(text for trace in traces for text in trace.uncompared()))

    def rows(self) -> list[TableRow]:
        """Return the causes, then the conditions with their repetitions and different results."""
        conditions = [
            TableRow(
                name,
                f"threads: {condition.threads}",
                f"repetitions: {len(condition.traces)}",
                results_text(condition),
                units=math.nan,
            )
            for name, condition in self.conditions.items()
        ]
        return [*(cause.row() for cause in self.causes), *conditions]

    @property
    def notes(self) -> list[str]:
        """Return conditions that did not run, errors and values that are not finite."""
        plain = self.conditions[PLAIN].traces
        notes = [] if SYNCHRONISED in self.conditions else [f"{SYNCHRONISED}: not run, a CPU queues nothing"]
        if ONE_THREAD not in self.conditions:
            notes.append(f"{ONE_THREAD}: not compared with several, since the step ran with one")
        errors = [trace.error for name in (PLAIN, OBSERVED) for trace in self.conditions[name].traces]
        notes += [f"the step ended with {error}" for error in dict.fromkeys(filter(None, errors))]
        broken = dict.fromkeys(name for trace in plain for name in trace.not_finite)
        for name in list(broken)[:MOST_LISTED]:
            count = sum(name in trace.not_finite for trace in plain)
            notes.append(f"{name} is not finite (NaN or infinity) in {count} of {len(plain)} repetitions")
        return notes

    def lines(self) -> list[str]:
        """Return verdict, table, what to try, and notes, for a terminal."""
        lines = [f"conclusion: {self.verdict}", *text_table(self.rows())]
        if not self.causes:
            lines.append("a fault that is rarer, or that needs other conditions, is not excluded")
        lines += [f"try: {cause.alternative}" for cause in self.causes if cause.alternative]
        if listed := self.uncompared():
            more = "; ".join(listed[:MOST_LISTED])
            lines.append(f"{len(listed)} operations or results could not be compared: {more}")
        return [*lines, *(f"note: {note}" for note in self.notes)]

    def as_json(self) -> dict[str, Any]:
        """Return plain data: conclusion, rows, what could not be compared, notes."""
        return {
            "conclusion": self.verdict,
            "fault": self.is_fault,
            "rows": [row.as_json for row in self.rows()],
            "uncompared": self.uncompared(),
            "alternatives": [cause.alternative for cause in self.causes if cause.alternative],
            "notes": self.notes,
        }


def results_text(condition: Condition) -> str:
    """Return what the repetitions of a condition gave: equal, or the number of different results."""
    if condition.traces and all(trace.error for trace in condition.traces):
        return f"raises {condition.traces[0].error}"
    if len(condition.traces) < 2:
        return ""
    return "equal" if condition.distinct == 1 else f"{condition.distinct} different"


class Evidence:
    """Compare the traces of each condition. capture: repeats the step and keeps the tensors of one operation."""

    def __init__(
        self,
        found: Mapping[str, Condition],
        capture: Callable[[str, int], tuple[list[Tensor], list[Tensor]]],
    ) -> None:
        self.found, self.capture = found, capture
        self.causes: list[RepeatCause] = []
        waits = found.get(SYNCHRONISED)
        self.vanishes = waits is not None and waits.distinct == 1  # where each operation waits

    def collect(self) -> list[RepeatCause]:
        """Return the causes, the most certain first."""
        self._overwritten()
        self._uninitialised()
        if not self.causes:
            if self._differs(PLAIN) or self._differs(OBSERVED):
                self._one_process()
            else:
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
            name: [trace for trace in each.traces if trace.overwritten] for name, each in self.found.items()
        }
        if not any(where.values()):
            return
        trace = next(traces[0] for traces in where.values() if traces)
        reader, position = trace.overwritten[0]
        text = f"input {position} changed since it was written, and no observed operation wrote it"
        vanishes = where.get(SYNCHRONISED) == [] and where[OBSERVED]
        self._add(ASYNCHRONOUS if vanishes else UNOBSERVED_WRITE, text, trace.events[reader])

    def _uninitialised(self) -> None:
        """Two contents of new memory give two results, first at an input that torch.empty returned."""
        one, other = self.found[ZEROS].traces[0], self.found[NAN].traces[0]
        difference = first_difference(one, other)
        if (
            difference is None
            or difference.kind != "input"
            or (one.results, one.error) == (other.results, other.error)
        ):
            return
        reader, position = one.events[difference.event], difference.position
        if position in reader.unset:
            self._add(UNINITIALISED, f"input {position} is memory of torch.empty", reader)

    def _one_process(self) -> None:
        """The traces of one process differ."""
        if not self._differs(OBSERVED):
            self._add(
                ASYNCHRONOUS if SYNCHRONISED in self.found else TIMING, "observed repetitions are equal"
            )
            return
        reference, *others = self.found[OBSERVED].traces
        pairs = [(found, trace) for trace in others if (found := first_difference(reference, trace))]
        difference, trace = min(pairs, key=lambda pair: (pair[0].event < 0, pair[0].event))
        event, text = event_of(difference, trace), difference_text(difference, trace)
        shape = self._pattern(OBSERVED, OBSERVED, difference)
        named = {"operations": PATH, "scalar": PYTHON, "input": STATE}
        if self.vanishes:
            self._add(ASYNCHRONOUS, text, event, shape)
        elif difference.kind in named:
            self._add(named[difference.kind], text, event)
        elif event is None or difference.kind != "output" or not event.knows_inputs:
            self._add(UNNAMED, text, event)
        elif self._differs(ONE_THREAD) is False:
            self._add(THREADS, text, event, shape)
        elif shape is None:
            self._add(UNNAMED, f"{text}; it did not recur when its values were captured", event)
        else:
            self._add(IN_OPERATION if shape.regular else NOT_DETERMINISTIC, text, event, shape)

    def _between_processes(self) -> None:
        reference = self.found[OBSERVED].traces[0]
        for trace in self.found[FRESH].traces if FRESH in self.found else []:
            if difference := first_difference(reference, trace):
                self._add(PROCESS, difference_text(difference, trace), event_of(difference, trace))
                return

    def _threads(self) -> None:
        """One thread and several threads are reproducible each, and differ."""
        if ONE_THREAD not in self.found or self._differs(ONE_THREAD) or self._differs(OBSERVED):
            return
        trace = self.found[ONE_THREAD].traces[0]
        difference = first_difference(self.found[OBSERVED].traces[0], trace)
        if difference and not trace.overwritten:
            shape = self._pattern(OBSERVED, ONE_THREAD, difference)
            self._add(THREADS, difference_text(difference, trace), event_of(difference, trace), shape)

    def _pattern(self, one: str, other: str, difference: TraceDifference) -> Pattern | None:
        """Capture the operation under both conditions until its outputs differ. None where they do not."""
        if difference.kind != "output":
            return None
        inputs, reference = self.capture(one, difference.event)
        for _ in range(max(len(self.found[other].traces), 2)):
            _, outputs = self.capture(other, difference.event)
            for good, bad in zip(reference, outputs, strict=False):
                alike = (good.shape, good.dtype) == (bad.shape, bad.dtype)
                if alike and (shape := pattern(good, bad, inputs)):
                    return shape
        return None


def event_of(difference: TraceDifference, trace: Trace) -> OperationEvent | None:
    return trace.events[difference.event] if 0 <= difference.event < len(trace.events) else None


def difference_text(difference: TraceDifference, trace: Trace) -> str:
    """Return which value of the operation differs first, and what is known of its inputs."""
    event = event_of(difference, trace)
    if event is None or difference.text:
        return difference.text
    if difference.kind == "output":
        return f"output {difference.position}, inputs {'equal' if event.knows_inputs else 'unknown'}"
    writer = event.writers[difference.position] if difference.position < len(event.writers) else -1
    return f"input {difference.position}, written by {trace.events[writer].title if writer >= 0 else 'before the step'}"


def repeat_step(
    step: Callable[[], Any] | ReplayedStep,
    state: Mapping[str, Any] | Sequence[Any] = (),
    times: int = 8,
    threads: int | None = None,
    synchronise: Callable[[], object] | None = None,
    others: Callable[[Conditions], None] = lambda conditions: None,
    progress: Callable[[str], object] = lambda name: None,
) -> Repetition:
    """Repeat a step in this process and conclude.

    Args:
        step: runs one step; tensors that it returns are results. A ReplayedStep has its state already.
        state: objects with state_dict, restored before each repetition: the model, the optimizer.
        times: repetitions of each condition, at least 2.
        threads: of the CPU, besides one thread. By default torch's number, or all CPUs where torch has one thread.
        synchronise: waits for all queued work; by default that of the accelerator.
        others: adds conditions of other processes.
        progress: receives the name of each condition.

    NumericsError where `times` or a state cannot be used. The state of before is restored at the end.
    """
    if isinstance(times, bool) or not isinstance(times, int) or not 2 <= times <= MOST_TIMES:
        raise NumericsError(f"times is {times!r}; fix: a number from 2 to {MOST_TIMES}")
    if not isinstance(step, ReplayedStep):
        step = ReplayedStep(step, state)
    many = torch.get_num_threads()
    many = threads or (many if many > 1 else os.cpu_count() or 1)
    if synchronise is None and torch.accelerator.is_available():
        synchronise = torch.accelerator.synchronize
    conditions = Conditions(step, times, many, synchronise, progress)
    try:
        conditions.run()
        others(conditions)
        return Repetition(conditions.found, Evidence(conditions.found, conditions.capture).collect())
    finally:
        step.restore()
