"""Check captured steps of optimizers, and calls of custom functions, in float64 and again on the device.

The float64 reference is the optimizer's implementation tensor by tensor: foreach and fused are off.
"""

from __future__ import annotations

import pickle
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import Optimizer

from referee.errors import NumericsError
from referee.numerics.record import captured_steps
from referee.numerics.rounding.operation_checks import Operation, Skipped, random_gradients
from referee.numerics.rounding.within_rounding import FunctionCall

PLAINLY = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}


def step_operations(folder: Path, prefix: str = "") -> Iterator[Operation | Skipped]:
    """Yield the optimizer's steps of a rank's folder. NumericsError where the file cannot be read."""
    for row in _rows(folder / captured_steps.FILE):
        yield operation_of(captured_steps.OptimizerStep(**row), prefix)


def operation_of(step: captured_steps.OptimizerStep, prefix: str = "") -> Operation | Skipped:
    """Return the operation of a step: its arguments are parameters, gradients and state; or why there is none."""
    name = prefix + step.title
    if step.why:
        return Skipped(name, step.label, step.why)
    kind = _imported(*step.kind.rpartition(".")[::2], Optimizer)
    if kind is None:
        return Skipped(name, step.label, f"{step.kind} cannot be imported")
    results = [tensor for after in step.after for tensor in _with_state(after["parameter"], after["state"])]
    inputs = [[before[part] for before in step.before] for part in ("parameter", "gradient", "state")]
    eps = _default_eps(step)
    call = FunctionCall(_replay(kind, step, eps), inputs, {})
    return Operation(name, step.label, call, _replay(kind, step, PLAINLY | eps), results)


def custom_operations(folder: Path, prefix: str = "") -> Iterator[Operation | Skipped]:
    """Yield the calls of custom functions of a rank's folder, or why one cannot be checked.

    The gradients of the results are generated. NumericsError where the file cannot be read.
    """
    for row in _rows(folder / captured_steps.FUNCTIONS_FILE):
        name, label = prefix + row["name"], row["label"]
        kind: Any = _imported(row["module"], row["qualname"], Function)
        if row["why"] or kind is None:
            unknown = f"custom function that cannot be imported: {row['module']}.{row['qualname']}"
            yield Skipped(name, label, row["why"] or unknown)
            continue
        results = row["results"]
        received = random_gradients(results) if row["differentiable"] and results else None
        call = FunctionCall(kind.apply, row["args"], {}, received, row["wanted"])
        yield Operation(name, label, call, None, results)


def _rows(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    try:
        rows: list[dict[str, Any]] = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, TypeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise NumericsError(f"{file} cannot be loaded: {reason}; fix: record the step again") from error
    return rows


def _default_eps(step: captured_steps.OptimizerStep) -> dict[str, Any]:
    """Return the eps of an optimizer that takes that of the parameters' dtype for None, as Adafactor."""
    eps = step.options[0].get("eps")
    if not isinstance(eps, tuple) or None not in eps:
        return {}
    default = torch.finfo(step.before[0]["parameter"].dtype).eps
    return {"eps": tuple(default if part is None else part for part in eps)}


def _imported(module: str, qualname: str, base: type) -> Any:
    """Return a class by its module and name; None where it cannot be imported or is none of a base."""
    try:
        found: Any = pkgutil.resolve_name(f"{module}:{qualname}")
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) and issubclass(found, base) else None


def _replay(
    kind: Any, step: captured_steps.OptimizerStep, changed: dict[str, Any]
) -> Callable[..., list[Tensor]]:
    """Return a function of parameters, gradients and state that returns parameters and state after the step."""

    def run(
        parameters: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[dict[str, Any]]
    ) -> list[Tensor]:
        leaves = [nn.Parameter(value.detach()) for value in parameters]
        groups = []
        for place, options in enumerate(step.options):
            members = [leaf for leaf, group in zip(leaves, step.groups, strict=True) if group == place]
            settings = {name: changed.get(name, value) for name, value in options.items()}
            groups += [{"params": members, **settings}] if members else []
        optimizer = kind(groups)
        for leaf, gradient, state in zip(leaves, gradients, states, strict=True):
            leaf.grad = gradient.detach()
            optimizer.state[leaf] = {
                name: _count(value, leaf, groups) if name == "step" else value
                for name, value in state.items()
            }
        unhooked = getattr(kind.step, "__wrapped__", kind.step)  # without hooks and marks of the profiler
        with torch.no_grad():
            unhooked(optimizer)
        return [tensor for leaf in leaves for tensor in _with_state(leaf.detach(), optimizer.state[leaf])]

    return run


def _count(value: Any, leaf: Tensor, groups: Sequence[dict[str, Any]]) -> Any:
    """Return the number of steps as torch keeps it: a float32 scalar, on the device for fused kernels."""
    if not isinstance(value, float):
        return value
    on_device = any(group.get("fused") or group.get("capturable") for group in groups)
    return torch.tensor(value, dtype=torch.float32, device=leaf.device if on_device else "cpu")


def _with_state(parameter: Tensor, state: dict[str, Any]) -> list[Tensor]:
    """Return a parameter and the tensors of its state, by name; the number of steps is none of them."""
    names = sorted(
        name
        for name, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point() and name != "step"
    )
    return [parameter, *(state[name] for name in names)]
