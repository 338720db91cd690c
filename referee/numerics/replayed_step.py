"""Training steps that can be run again from one state: what record, repeat, bisect and fix take.

A factory FILE.py:FUNCTION returns (step, state): a function that runs one training step, and the objects with
state_dict that it changes; or a ReplayedStep, which says more.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from referee.errors import NumericsError, described
from referee.numerics.describe import tensors_in

FORM = "FILE.py:FUNCTION"
Stopped = Callable[[Callable[[], None]], AbstractContextManager[Any]]


class ReplayedStep:
    """Training steps that can be run from one state, any number of times.

    function: runs the next step. The tensors and numbers that it returns are its results: the loss, and the norm of the
    gradient if there is one. state: objects with state_dict and load_state_dict, such as the model, the optimizer and
    the position in the data, by name. Their state, the gradients of modules and the generators of random numbers are
    restored before each replay.

    steps: of one replay; the last one is recorded and repeated. start: steps before them. before: losses of these, by
    which a spike is judged. golden: a right run, a referee.verdict.loss_files.LossCurve.
    epsilon: rounding of the formats that the steps compute in. others: modules outside of the model, such as a loss, by
    name. fixes: applies words and returns an object with undo(); by default referee.numerics.fix. before_update: a
    context that calls its argument before the optimizer releases the gradients; by default a hook of the optimizer.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        state: Mapping[str, Any] | Sequence[Any] = (),
        *,
        steps: int = 1,
        start: int = 0,
        before: Sequence[float] = (),
        golden: Any = None,
        epsilon: float = 2.0**-23,
        others: Mapping[str, nn.Module] | None = None,
        fixes: Callable[[str], Any] | None = None,
        before_update: Stopped | None = None,
    ) -> None:
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
        self.function, self.state, self.steps, self.start = function, state, steps, start
        self.before, self.golden, self.epsilon = before, golden, epsilon
        self.others = dict(others or {})
        self.fixes = fixes
        self.before_update = before_update or self._before_update
        self.modules = {name: part for name, part in state.items() if isinstance(part, nn.Module)}
        single = len(self.modules) == 1
        self.places = {"" if single else name: part for name, part in self.modules.items()}
        self.save()

    @property
    def model(self) -> nn.Module:
        """Return the first module of the state. NumericsError without one."""
        if not self.modules:
            raise NumericsError("the state has no module; fix: return (step, [model, optimizer])")
        return next(iter(self.modules.values()))

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        parts = self.state.values()
        return next((part for part in parts if isinstance(part, torch.optim.Optimizer)), None)

    @property
    def device(self) -> str:
        """Return the type of the device that the modules are on."""
        values = [value for module in self.modules.values() for value in module.parameters()]
        return next((value.device.type for value in values if value.device.type != "cpu"), "cpu")

    def save(self) -> None:
        """Let replays start at the present state."""
        self._saved = {name: copy.deepcopy(part.state_dict()) for name, part in self.state.items()}
        self._gradients = [
            (value, None if value.grad is None else value.grad.clone())
            for module in self.modules.values()
            for value in module.parameters()
        ]
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state(), _accelerator_states()

    def restore(self) -> None:
        """Return to the state at which replays start."""
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

    def advance(self) -> None:
        """Run all steps but the last, and let replays start there."""
        self.restore()
        for _ in range(self.steps - 1):
            self.function()
        self.start, self.steps = self.start + self.steps - 1, 1
        self.save()

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

    @contextlib.contextmanager
    def _before_update(self, stop: Callable[[], None]) -> Any:
        handle = self.optimizer.register_step_pre_hook(lambda *call: stop()) if self.optimizer else None
        yield
        if handle:
            handle.remove()


def _accelerator_states() -> dict[int, Tensor]:
    if not torch.accelerator.is_available():
        return {}
    module = torch.get_device_module()
    return {index: module.get_rng_state(index) for index in range(torch.accelerator.device_count())}


def load_replay(text: str) -> ReplayedStep:
    """Import FILE.py and call FUNCTION. NumericsError where either cannot be used."""
    path, colon, name = text.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise NumericsError(f"{text} names no function; fix: {FORM}")
    if not Path(path).is_file():
        raise NumericsError(f"{path} is not a file; fix: {FORM}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise NumericsError(f"{path} is not a Python file; fix: {FORM}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))  # its imports work as in a script
    try:
        spec.loader.exec_module(module)
        make = getattr(module, name, None)
        made = make() if callable(make) else None
    except Exception as error:
        raise NumericsError(f"{text} fails: {described(error)}; fix: run it without numerics") from error
    if not callable(make):
        raise NumericsError(f"{path} has no function {name}; fix: {FORM}")
    if isinstance(made, ReplayedStep):
        return made
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        return ReplayedStep(made[0], made[1])
    raise NumericsError(
        f"{name} returned {type(made).__name__}; fix: return (step, state), a function and the objects that it changes"
    )
