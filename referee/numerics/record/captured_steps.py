"""Copy the parameters, gradients and state of optimizers before a step, and the results after it.

Of an optimizer that treats every element alone, the first rows of each parameter are copied; of others, whole
parameters. Hooks of torch call the functions below, so that the optimizer and its numbers stay as they are.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from referee.numerics.describe import SCALARS, is_dense, tensors_in
from referee.numerics.record.function_calls import recomputes

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


@dataclass
class OptimizerStep:
    """Parameters that one step changes together: one parameter where they are independent."""

    kind: str  # "torch.optim.adamw.AdamW"
    number: int
    options: list[dict[str, Any]]  # of the groups of parameters
    names: list[str] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)  # of each parameter: the place of its options
    before: list[dict[str, Any]] = field(default_factory=list)  # "parameter", "gradient" and "state" of each
    after: list[dict[str, Any]] = field(default_factory=list)  # "parameter" and "state" of each
    why: str = ""  # the reason why it cannot be checked, then without tensors
    values: list[Tensor] = field(default_factory=list)  # the parameters, until after the step

    @property
    def label(self) -> str:
        return f"{self.kind.rpartition('.')[2]} step"

    @property
    def title(self) -> str:
        listed = self.names[0] if len(self.names) == 1 else f"{len(self.names)} parameters"
        return f"{self.label} {self.number}, {listed}"


def before_step(
    optimizer: Optimizer, names: Mapping[int, str], number: int = 0, has_closure: bool = False
) -> list[OptimizerStep]:
    """Copy what a step of the optimizer will read. names: of parameters by id. number: of the step."""
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    options = [_plain_options(group) for group in optimizer.param_groups]
    members = [
        (place, value, names.get(id(value), f"group {place}, parameter {index}"))
        for place, group in enumerate(optimizer.param_groups)
        for index, value in enumerate(group["params"])
        if value.grad is not None
    ]
    alone = type(optimizer) in ELEMENTWISE
    found = []
    together = [[member] for member in members] if alone else [members]
    for part in filter(None, together):
        step = OptimizerStep(kind, number, options)
        step.names = [name for _, _, name in part]
        step.groups = [place for place, _, _ in part]
        step.values = [value for _, value, _ in part]
        step.why = "the step calls a closure" if has_closure else _unchecked(step.values, alone)
        if not step.why:
            step.before = [_copies(optimizer, value, value.grad) for value in step.values]
        found.append(step)
    return found


class StepCapture:
    """Copy every step of every optimizer of this process between start() and stop()."""

    def __init__(self) -> None:
        self.steps: list[OptimizerStep] = []
        self.names: dict[int, str] = {}
        self._open: list[OptimizerStep] = []
        self._handles: list[RemovableHandle] = []
        self._number = 0

    def start(self, modules: Iterable[nn.Module]) -> None:
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
        self._open = before_step(optimizer, self.names, self._number, closure)
        self._number += 1

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for step in self._open:
            if not step.why:
                step.after = [_copies(optimizer, value) for value in step.values]
            step.values = []
        self.steps += self._open

    def write(self, folder: Path) -> None:
        """Write FILE into the folder of a step and rank; nothing where no optimizer stepped."""
        if self.steps:
            torch.save([vars(step) for step in self.steps], folder / FILE)
        self.steps = []


def _unchecked(values: Sequence[Tensor], alone: bool) -> str:
    """Return why a step of parameters cannot be checked; "" where it can."""
    if not all(is_dense(value) and is_dense(value.grad) for value in values):
        return "a sharded, sparse or other parameter or gradient"
    if not all(value.is_floating_point() for value in values):
        return "a parameter that is not a real number"
    if not alone and sum(value.numel() for value in values) > LARGEST:
        return f"large: over {LARGEST:,} elements, of an optimizer that needs all"
    return ""


def _copies(optimizer: Optimizer, value: Tensor, gradient: Tensor | None = None) -> dict[str, Any]:
    """Return copies of a parameter, of its state, and of its gradient where given."""
    most = MOST if type(optimizer) in ELEMENTWISE else LARGEST
    state: dict[str, Any] = {}
    for name, part in optimizer.state.get(value, {}).items():
        if isinstance(part, Tensor):
            state[name] = float(part) if name == "step" else _copy(part, most)
        elif isinstance(part, SCALARS):
            state[name] = part
    tensors = {"parameter": value} if gradient is None else {"parameter": value, "gradient": gradient}
    return {"state": state} | {name: _copy(part, most) for name, part in tensors.items()}


def _copy(tensor: Tensor, most: int) -> Tensor:
    """Return a copy, on the CPU, of the first rows that have at most `most` elements together, one at least."""
    part = tensor.detach()
    if part.numel() > most and part.dim():
        part = part[: max(1, most * part.shape[0] // part.numel())]
    return part.clone(memory_format=torch.contiguous_format).cpu()


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, Tensor) else value

    found = {
        name: tuple(map(plain, value)) if isinstance(value, tuple | list) else plain(value)
        for name, value in group.items()
        if name != "params"
    }
    return {name: value for name, value in found.items() if isinstance(value, (*SCALARS, tuple))}


class Makers:
    """The recorded call that last returned each tensor. A view has the maker of the memory that it shows."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[StorageWeakRef, str]] = {}

    def add(self, tensor: Tensor, name: str) -> None:
        # sparse and wrapped tensors have no memory
        with contextlib.suppress(RuntimeError):
            reference = StorageWeakRef(tensor.untyped_storage())
            self._calls[reference.cdata] = reference, name

    def of(self, tensor: Tensor) -> str:
        """Return the name of the call; "" for a tensor that no recorded call returned."""
        with contextlib.suppress(RuntimeError):
            reference, name = self._calls.get(tensor.untyped_storage()._cdata, (None, ""))
            return "" if reference is None or reference.expired() else name
        return ""


@dataclass
class RecordedStep:
    """The rows of the step that is being recorded."""

    data: dict[str, Any] = field(default_factory=dict)
    stacks: dict[str, list[str]] = field(default_factory=dict)
    parents: dict[str, str | None] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)  # file name -> value
    calls: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)  # the notes that say what is not recorded
    exception: tuple[str, str] | None = None  # the call that raised, and what
    makers: Makers = field(default_factory=Makers)
    models: list[tuple[str, nn.Module]] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)  # of the models, by id
    roots: set[str] = field(default_factory=set)  # calls of the models that start() received
    uncalled: set[str] = field(
        default_factory=set
    )  # modules whose parameters are in the row of an outer module


@dataclass(frozen=True)
class OpenCall:
    """A call that runs. name: empty during a recomputation. begin: autograd's number before it."""

    name: str
    label: str
    inputs: tuple[Any, Any]
    begin: int
    recorded: bool


def backward_name(name: str) -> str:
    """Return the name of the backward of a call."""
    head, _, tail = name.rpartition("forward")
    return f"{head}backward{tail}"


# Copy the arguments and results of the calls of torch.autograd.Function.


FUNCTIONS_FILE = "custom_functions.pt"
LARGEST_FUNCTION = 1 << 22  # elements of a call


class CustomCalls:
    """Copy the calls of custom functions, not those within another one or in backward."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._inside = False

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Copy every call of this process in the block."""
        self.rows, self._counts, self._inside = [], Counter(), False
        original = Function.__dict__["apply"]

        def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
            if recomputes() or self._inside:
                return original.__func__(cls, *args, **kwargs)
            with torch._C.DisableTorchFunction():  # copies are no calls of the step
                row = self._begin(cls, args, kwargs)
            self._inside = True
            try:
                output = original.__func__(cls, *args, **kwargs)
            finally:
                self._inside = False
            with torch._C.DisableTorchFunction():
                self._end(row, output)
            return output

        Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Function.apply = original  # type: ignore[method-assign]

    def _begin(self, cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        label = cls.__qualname__.replace("<locals>.", "")
        number = self._counts[label]
        self._counts[label] += 1
        given = tensors_in(list(args))
        tensors = [tensor for tensor in given if tensor.is_floating_point() or tensor.is_complex()]
        row: dict[str, Any] = {
            "name": f"Function.{label}.{number}.forward", "label": f"Function.{label}", "module": cls.__module__,
            "qualname": cls.__qualname__, "why": "", "args": [], "results": [],
            "wanted": [tensor.requires_grad for tensor in tensors],
            "differentiable": torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        }  # fmt: skip
        if kwargs:
            row["why"] = "custom function with arguments by name"
        elif strange := next((part for part in args if not _plain(part)), None):
            row["why"] = f"custom function with an argument of type {type(strange).__name__}"
        elif sum(tensor.numel() for tensor in given) > LARGEST_FUNCTION:
            row["why"] = f"large: over {LARGEST_FUNCTION:,} elements"
        else:
            row["args"] = [_copied(part) for part in args]
        self.rows.append(row)
        return row

    def _end(self, row: dict[str, Any], output: Any) -> None:
        found = tensors_in(list(output) if isinstance(output, tuple) else output)
        if not row["why"] and all(map(is_dense, found)):
            row["results"] = [_copied(tensor) for tensor in found]

    def write(self, folder: Path) -> None:
        """Write FILE into the folder of a step and rank; nothing where no custom function ran."""
        if self.rows:
            torch.save(self.rows, folder / FUNCTIONS_FILE)
        self.rows = []


def _plain(value: Any) -> bool:
    plain = (*SCALARS, torch.Size, torch.dtype)
    return all(
        is_dense(part) if isinstance(part, Tensor) else isinstance(part, plain) for part in tree_leaves(value)
    )


def _copied(value: Any) -> Any:
    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)

    return tree_map_only(Tensor, copy, value)
