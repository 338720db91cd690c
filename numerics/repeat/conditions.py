"""Repeat a step under conditions that each exclude one kind of cause, section 2.3.2 of the guide."""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from numerics.describe import tensors_in
from numerics.errors import NumericsError
from numerics.repeat.observe import OperationObserver
from numerics.repeat.trace import Trace, first_difference

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


class RepeatableStep:
    """A step that can be repeated from one state.

    function: runs the step; the tensors that it returns are results. state: objects with state_dict and
    load_state_dict, such as the model and the optimizer, by name. Their state, the gradients of modules and the
    generators of random numbers are restored before each repetition.
    """

    def __init__(self, function: Callable[[], Any], state: Mapping[str, Any] | Sequence[Any] = ()) -> None:
        if not isinstance(state, Mapping):
            names = [type(part).__name__ for part in state]
            state = {
                name if names.count(name) == 1 else f"{name}{number}": part
                for number, (name, part) in enumerate(zip(names, state, strict=True))
            }
        for name, part in state.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise NumericsError(
                    f"state has {name}, a {type(part).__name__} without state_dict; fix: give the model and the "
                    "optimizer"
                )
            if isinstance(part, nn.Module) and any(map(is_lazy, [*part.parameters(), *part.buffers()])):
                raise NumericsError(f"{name} has parameters without a shape; fix: call it once before")
        self.function, self.state = function, state
        self.modules = {name: part for name, part in state.items() if isinstance(part, nn.Module)}
        single = len(self.modules) == 1
        self.places = {"" if single else name: part for name, part in self.modules.items()}
        self._saved = {name: copy.deepcopy(part.state_dict()) for name, part in state.items()}
        self._gradients = [
            (value, None if value.grad is None else value.grad.clone())
            for module in self.modules.values()
            for value in module.parameters()
        ]
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state(), _accelerator_states()

    def restore(self) -> None:
        for name, part in self.state.items():
            part.load_state_dict(copy.deepcopy(self._saved[name]))
        for value, gradient in self._gradients:
            value.grad = None if gradient is None else gradient.clone()
        python, numpys, cpu, devices = self._random
        random.setstate(python)
        np.random.set_state(numpys)
        torch.set_rng_state(cpu)
        for index, state in devices.items():
            torch.get_device_module().set_rng_state(state, index)

    def results(self, returned: Any) -> dict[str, Tensor]:
        """Return the tensors by name: returned ones, parameters, gradients, buffers, states of optimizers."""
        found = {f"returned {number}": value for number, value in enumerate(tensors_in(returned))}
        for name, module in self.places.items():
            for path, value in [*module.named_parameters(), *module.named_buffers()]:
                title = ".".join(filter(None, (name, path)))
                found[title] = value
                if value.grad is not None:
                    found[f"gradient of {title}"] = value.grad
        for name, part in self.state.items():
            if not isinstance(part, nn.Module):
                tensors = tensors_in(part.state_dict())
                found |= {f"state {number} of {name}": value for number, value in enumerate(tensors)}
        return found

    @property
    def device(self) -> str:
        """Return the type of the device that the modules are on."""
        values = [value for module in self.modules.values() for value in module.parameters()]
        return next((value.device.type for value in values if value.device.type != "cpu"), "cpu")


def _accelerator_states() -> dict[int, Tensor]:
    if not torch.accelerator.is_available():
        return {}
    module = torch.get_device_module()
    return {index: module.get_rng_state(index) for index in range(torch.accelerator.device_count())}


def run_once(step: RepeatableStep, observer: OperationObserver | None) -> Trace:
    """Run the step from its state. An error of the step ends its trace."""
    step.restore()
    error, returned = "", None
    if observer is None:
        observer = OperationObserver()  # hashes the results alone
        try:
            returned = step.function()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:MOST_ERROR]
    else:
        try:
            with observer.running():
                returned = step.function()
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
        step: RepeatableStep,
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
