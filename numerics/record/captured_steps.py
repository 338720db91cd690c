"""Copy the parameters, gradients and state of optimizers before a step, and the results after it.

Of an optimizer that treats every element alone, the first rows of each parameter are copied; of others, whole
parameters. Hooks of torch call the functions below, so that the optimizer and its numbers stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

MOST = 1 << 20  # elements of a parameter that are copied
LARGEST = 1 << 24  # elements of an optimizer that needs whole parameters
FILE = "optimizer_steps.pt"
# torch's optimizers of which each element of the result depends on the same elements of parameter, gradient and state.
ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD",
    )
)  # fmt: skip
PLAIN = (bool, int, float, str, type(None))


@dataclass
class OptimizerStep:
    """Parameters that one step changes together: one parameter where they are independent.

    kind: "torch.optim.adamw.AdamW". names, groups: of each parameter: its name, and the place of its options in
    `options`. sizes: elements of the whole parameters. before, after: for each parameter "parameter", "gradient" and
    "state". why: the reason why it cannot be checked, then without tensors.
    """

    kind: str
    number: int
    names: list[str]
    groups: list[int] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    before: list[dict[str, Any]] = field(default_factory=list)
    after: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""

    @property
    def label(self) -> str:
        return f"{self.kind.rpartition('.')[2]} step"

    @property
    def title(self) -> str:
        listed = self.names[0] if len(self.names) == 1 else f"{len(self.names)} parameters"
        return f"{self.label} {self.number}, {listed}"


def before_step(
    optimizer: Optimizer, names: Mapping[int, str] | None = None, number: int = 0, has_closure: bool = False
) -> list[OptimizerStep]:
    """Copy what a step of the optimizer will read. names: of parameters by id. number: of the step."""
    names = names or {}
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    found: list[OptimizerStep] = []
    alone = type(optimizer) in ELEMENTWISE
    options = [_plain_options(group) for group in optimizer.param_groups]
    members = [
        (place, value, names.get(id(value), f"group {place}, parameter {index}"))
        for place, group in enumerate(optimizer.param_groups)
        for index, value in enumerate(group["params"])
        if value.grad is not None
    ]
    total = sum(value.numel() for _, value, _ in members)
    for place, value, name in members:
        if alone or not found:
            found.append(OptimizerStep(kind, number, [], options=options))
        step = found[-1]
        step.names.append(name)
        step.groups.append(place)
        step.sizes.append(value.numel())
        step.why = step.why or _unchecked(value, None if alone else total, has_closure)
        if not step.why:
            rows = _rows(value) if alone else None
            step.before.append(
                {
                    "parameter": _copy(value, rows),
                    "gradient": _copy(value.grad, rows),  # type: ignore[arg-type]
                    "state": _state(optimizer, value, rows),
                }
            )
    for step in found:
        if step.why:
            step.before.clear()
    return found


def after_step(optimizer: Optimizer, steps: Iterable[OptimizerStep]) -> None:
    """Add the results of a step to what `before_step` returned."""
    values = iter(
        [value for group in optimizer.param_groups for value in group["params"] if value.grad is not None]
    )
    for step in steps:
        alone = type(optimizer) in ELEMENTWISE
        for _ in step.names:
            value = next(values, None)
            if value is None:
                step.why = step.why or "the step changes the gradients"
            elif not step.why:
                rows = _rows(value) if alone else None
                step.after.append({"parameter": _copy(value, rows), "state": _state(optimizer, value, rows)})


class StepCapture:
    """Copy every step of every optimizer of this process between start() and stop()."""

    def __init__(self) -> None:
        self.steps: list[OptimizerStep] = []
        self.names: dict[int, str] = {}
        self._open: dict[int, list[OptimizerStep]] = {}
        self._handles: list[RemovableHandle] = []
        self._number = 0

    def start(self, modules: Iterable[nn.Module] = ()) -> None:
        """modules: whose parameters have names."""
        self.steps, self._number = [], 0
        self.names = {id(value): name for module in modules for name, value in module.named_parameters()}
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ]

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        closure = any(part is not None for part in (*args[1:], kwargs.get("closure")))
        with torch.no_grad():
            self._open[id(optimizer)] = before_step(optimizer, self.names, self._number, closure)
        self._number += 1

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        steps = self._open.pop(id(optimizer), [])
        with torch.no_grad():
            after_step(optimizer, steps)
        self.steps += steps

    def write(self, folder: Path) -> None:
        """Write FILE into the folder of a step and rank; nothing where no optimizer stepped."""
        if self.steps:
            torch.save([vars(step) for step in self.steps], folder / FILE)
        self.steps = []


def _unchecked(value: Tensor, total: int | None, has_closure: bool) -> str:
    gradient = value.grad
    assert gradient is not None
    if has_closure:
        return "the step calls a closure"
    if type(value) not in (Tensor, nn.Parameter) or gradient.layout is not torch.strided or value.is_meta:
        return "a sharded, sparse or other parameter or gradient"
    if not value.is_floating_point():
        return "a parameter that is not a real number"
    if total is not None and total > LARGEST:
        return f"large: over {LARGEST:,} elements, of an optimizer that needs all"
    return ""


def _rows(value: Tensor) -> int | None:
    """Return how many rows have at most MOST elements; None for all."""
    if value.numel() <= MOST or value.dim() == 0:
        return None
    return max(1, MOST * value.shape[0] // value.numel())


def _copy(tensor: Tensor, rows: int | None) -> Tensor:
    part = tensor.detach() if rows is None else tensor.detach()[:rows]
    return part.clone(memory_format=torch.contiguous_format).cpu()


def _state(optimizer: Optimizer, value: Tensor, rows: int | None) -> dict[str, Any]:
    """Return the state of a parameter: tensors of its shape by rows, scalars as numbers, other tensors whole."""
    found: dict[str, Any] = {}
    for name, part in optimizer.state.get(value, {}).items():
        if isinstance(part, Tensor):
            found[name] = (
                float(part) if name == "step" else _copy(part, rows if part.shape == value.shape else None)
            )
        elif isinstance(part, PLAIN):
            found[name] = part
    return found


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, Tensor) else value

    found = {
        name: tuple(map(plain, value)) if isinstance(value, tuple | list) else plain(value)
        for name, value in group.items()
        if name != "params"
    }
    return {name: value for name, value in found.items() if isinstance(value, (*PLAIN, tuple))}
