"""Check steps of optimizers: each step in float64, and again on the device, from recorded parameters, gradients, state.

The float64 reference is the optimizer's implementation tensor by tensor (foreach and fused off), so that the rows of
the table for its additions, products, roots and divisions bound a fused or multi-tensor kernel, too.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from numerics.errors import NumericsError
from numerics.oracle.check import Oracle, default_device
from numerics.oracle.operation import RECORDED, Operation
from numerics.oracle.results import Check, Skipped
from numerics.oracle.steps.capture import FILE, OptimizerStep, before_step

PLAINLY = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}


def step_operations(folder: Path, prefix: str = "") -> Iterator[Operation | Skipped]:
    """Yield the optimizer's steps of a rank's folder. NumericsError where the file cannot be read."""
    file = folder / FILE
    if not file.exists():
        return
    try:
        rows = torch.load(file, map_location="cpu", weights_only=True)
        steps = [OptimizerStep(**row) for row in rows]
    except (RuntimeError, TypeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise NumericsError(f"{file} cannot be loaded: {reason}; fix: record the step again") from error
    for step in steps:
        yield operation_of(step, prefix)


def operation_of(
    step: OptimizerStep, prefix: str = "", kind: type[Optimizer] | None = None
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
    names = {} if model is None else {id(value): name for name, value in model.named_parameters()}
    oracle = Oracle(torch.device(device) if device else default_device())
    with torch.no_grad():
        steps = before_step(optimizer, names)
    for step in steps:
        found = operation_of(step, kind=type(optimizer))
        if isinstance(found, Skipped):
            oracle.skipped.append(found)
        else:
            oracle.check(found)
    if not oracle.checks:
        reasons = (
            "; ".join(dict.fromkeys(skip.reason for skip in oracle.skipped)) or "no parameter has a gradient"
        )
        raise NumericsError(
            f"{type(optimizer).__name__} cannot be checked: {reasons}; fix: call it after backward, before step"
        )
    return oracle.checks


def _default_eps(step: OptimizerStep) -> dict[str, Any]:
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
    kind: Any, step: OptimizerStep, changed: dict[str, Any], keys: list[list[str]] | None
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
