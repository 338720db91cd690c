"""Check steps of optimizers and calls of custom functions: in float64, and again on the device, from recorded values.

The float64 reference is the optimizer's implementation tensor by tensor (foreach and fused off), so that the rows of
the table for its additions, products, roots and divisions bound a fused or multi-tensor kernel, too.
"""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import Optimizer

from numerics.describe import tensors_in
from numerics.errors import NumericsError
from numerics.oracle.check import Oracle, random_gradients, usable_device
from numerics.oracle.operation import RECORDED, Operation
from numerics.oracle.results import Check, Skipped
from numerics.record import captured_steps, custom_functions

PLAINLY = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}


def step_operations(folder: Path, prefix: str = "") -> Iterator[Operation | Skipped]:
    """Yield the optimizer's steps of a rank's folder. NumericsError where the file cannot be read."""
    file = folder / captured_steps.FILE
    if not file.exists():
        return
    try:
        rows = torch.load(file, map_location="cpu", weights_only=True)
        steps = [captured_steps.OptimizerStep(**row) for row in rows]
    except (RuntimeError, TypeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise NumericsError(f"{file} cannot be loaded: {reason}; fix: record the step again") from error
    for step in steps:
        yield operation_of(step, prefix)


def operation_of(
    step: captured_steps.OptimizerStep, prefix: str = "", kind: type[Optimizer] | None = None
) -> Operation | Skipped:
    """Return the operation of a step: its arguments are parameters, gradients and state; or why there is none."""
    name = prefix + step.title
    if step.why:
        return Skipped(name, step.label, step.why)
    try:
        kind = kind or _class(step.kind)
    except (ImportError, AttributeError):
        return Skipped(name, step.label, f"{step.kind} cannot be imported")
    names = [
        [
            key
            for key, value in (after or before)["state"].items()
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        for before, after in zip(step.before, step.after or [{}] * len(step.before), strict=True)
    ]
    results = [
        tensor
        for after, keys in zip(step.after, names, strict=False)
        for tensor in (after["parameter"], *(after["state"][key] for key in keys))
    ]
    arguments = [
        [before["parameter"] for before in step.before],
        [before["gradient"] for before in step.before],
        [before["state"] for before in step.before],
    ]
    keys = names if step.after else None
    eps = _default_eps(step)
    return Operation(
        name,
        step.label,
        _replay(kind, step, eps, keys),
        arguments,
        reference=_replay(kind, step, PLAINLY | eps, keys),
        values=RECORDED,
        results=results,
    )


def check_optimizer(
    optimizer: Optimizer, device: str | torch.device | None = None, model: nn.Module | None = None
) -> list[Check]:
    """Check the next step of an optimizer, whose parameters have gradients, against float64. It is not carried out.

    model: for the names of the parameters. Returns the checks of each parameter and of its state. NumericsError where
    nothing can be checked.
    """
    if not isinstance(optimizer, Optimizer):
        raise NumericsError(f"{optimizer!r} is not a torch.optim.Optimizer; fix: pass the optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NumericsError("LBFGS cannot be checked: a step with a closure; fix: check another optimizer")
    names = {} if model is None else {id(value): name for name, value in model.named_parameters()}
    oracle = Oracle(usable_device(device, 'pass device="cpu"'))
    with torch.no_grad():
        steps = captured_steps.before_step(optimizer, names)
    for step in steps:
        found = operation_of(step, kind=type(optimizer))
        if isinstance(found, Skipped):
            oracle.skipped.append(found)
        else:
            oracle.check(found)
    if not oracle.checks:
        reasons = "; ".join(dict.fromkeys(skip.reason for skip in oracle.skipped))
        fix = "check another optimizer" if reasons else "call it after backward, before step"
        raise NumericsError(
            f"{type(optimizer).__name__} cannot be checked: {reasons or 'no parameter has a gradient'}; fix: {fix}"
        )
    return oracle.checks


def _default_eps(step: captured_steps.OptimizerStep) -> dict[str, Any]:
    """Return the eps of an optimizer that takes that of the parameters' dtype for None, as Adafactor."""
    eps = step.options[0].get("eps")
    if not isinstance(eps, tuple) or None not in eps:
        return {}
    default = torch.finfo(step.before[0]["parameter"].dtype).eps
    return {"eps": tuple(default if part is None else part for part in eps)}


def _class(path: str) -> type[Optimizer]:
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if not isinstance(found, type) or not issubclass(found, Optimizer):
        raise AttributeError(path)
    return found


def _replay(
    kind: Any, step: captured_steps.OptimizerStep, changed: dict[str, Any], keys: list[list[str]] | None
) -> Callable[..., list[Tensor]]:
    """Return a function of parameters, gradients and state that returns parameters and state after the step."""

    def run(
        parameters: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[dict[str, Any]]
    ) -> list[Tensor]:
        leaves = [nn.Parameter(value.detach()) for value in parameters]
        groups = []
        for place, options in enumerate(step.options):
            members = [leaf for leaf, group in zip(leaves, step.groups, strict=True) if group == place]
            own = {name: changed.get(name, value) for name, value in options.items()}
            groups += [{"params": members, **own}] if members else []
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
        found: list[Tensor] = []
        for place, leaf in enumerate(leaves):
            state = optimizer.state[leaf]
            known = keys[place] if keys else _floating(state)
            found += [leaf.detach(), *(state[name] for name in known)]
        return found

    return run


def _count(value: Any, leaf: Tensor, groups: Sequence[dict[str, Any]]) -> Any:
    """Return the number of steps as torch keeps it: a float32 scalar, on the device for fused kernels."""
    if not isinstance(value, float):
        return value
    on_device = any(group.get("fused") or group.get("capturable") for group in groups)
    return torch.tensor(value, dtype=torch.float32, device=leaf.device if on_device else "cpu")


def _floating(state: dict[str, Any]) -> list[str]:
    return [
        name
        for name, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point() and name != "step"
    ]


# -- custom functions


def custom_operations(folder: Path, prefix: str = "") -> Iterator[Operation | Skipped]:
    """Yield the calls of custom functions of a rank's folder, or why one cannot be checked.

    The gradients of the results are generated. NumericsError where the file cannot be read.
    """
    file = folder / custom_functions.FILE
    if not file.exists():
        return
    try:
        rows: list[dict[str, Any]] = torch.load(file, map_location="cpu", weights_only=True)
        found = [_custom_operation(row, prefix) for row in rows]
    except (RuntimeError, TypeError, KeyError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise NumericsError(f"{file} cannot be loaded: {reason}; fix: record the step again") from error
    yield from found


def _custom_operation(row: dict[str, Any], prefix: str) -> Operation | Skipped:
    name, label = prefix + row["name"], row["label"]
    if row["why"]:
        return Skipped(name, label, row["why"])
    kind = _function_class(row["module"], row["qualname"])
    if kind is None:
        return Skipped(
            name, label, f"custom function that cannot be imported: {row['module']}.{row['qualname']}"
        )
    if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors_in(row["args"])):
        return Skipped(name, label, "no floating tensor")
    operation = Operation(
        name, label, kind.apply, row["args"], wanted=row["wanted"], values=RECORDED, results=row["results"]
    )
    received = random_gradients(operation) if row["differentiable"] else None
    return dataclasses.replace(operation, received=received)


def _function_class(module: str, qualname: str) -> type[Function] | None:
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found if isinstance(found, type) and issubclass(found, Function) else None
