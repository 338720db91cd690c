"""Check the gradients: finite, present for every parameter, numerically right; parameters shared by accident."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.initial_weights import keyed_normal
from ra.admission.probe import Probe, examined_part, inputs, pristine, run, working_dtype
from ra.admission.results import Violation, violation

GRADIENTS, SHARED = "gradients", "shared"
ATTEMPTS = 3  # directions; a kink on the way spoils one of them, a wrong gradient all
# dtype of the arithmetic -> (relative step h, allowed relative error). The error of a central difference is about
# eps / h + h^2: 2e-10 in float64 and 6e-5 in float32. The allowed error is far above it and far below a wrong gradient.
STEPS = {torch.float64: (1e-6, 1e-4), torch.float32: (3e-3, 5e-2)}


def gradients(probe: Probe) -> Iterator[Violation]:
    """Gradients are finite, exist for every parameter and agree with differences of the output."""
    dtype = probe.dtypes[0]
    x_BTC = inputs(2, probe.ordinary, probe.shape.width, dtype)
    for layer, module in probe.parts("perturbed", dtype):
        found = list(_outside(layer, module, x_BTC)) or list(_missing(layer, module, x_BTC))
        yield from found
    yield from _hooked(probe)
    for layer, module in probe.parts("perturbed", dtype, edges=True):
        yield from _wrong(probe, layer, module)
    for layer, module in probe.parts("initial", dtype):
        yield from _dead_at_start(layer, module, x_BTC)


def _gradients(module: nn.Module, x_BTC: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The output and the gradients of a weighted sum of it, by parameter, on the module itself."""
    module.zero_grad()
    y_BTC = run(module, x_BTC, grad=True, copied=False)
    if y_BTC.requires_grad:
        (y_BTC * inputs(*x_BTC.shape, x_BTC.dtype, seed=7)).sum().backward()
    trained = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return y_BTC, trained


def _missing(layer: int, module: nn.Module, x_BTC: Tensor) -> Iterator[Violation]:
    used = pristine(module)
    _, found = _gradients(used, x_BTC)
    for name, gradient in found.items():
        if gradient is None or not gradient.any():
            yield violation(
                f"the parameter {name} has no gradient: it is never trained",
                "use it in the output without detach, .data and .item(), or remove it",
                module,
                layer=layer,
            )
        elif not bool(gradient.isfinite().all()):
            yield violation(
                f"the gradient of {name} is not finite on ordinary inputs",
                "avoid division by zero, and roots and logarithms of zero, in backward",
                module,
                layer=layer,
            )


def _dead_at_start(layer: int, module: nn.Module, x_BTC: Tensor) -> Iterator[Violation]:
    """A parameter without a gradient at its initial value, and after two steps of the others."""
    used = pristine(module)
    dead: set[str] | None = None
    for _ in range(3):
        _, found = _gradients(used, x_BTC)
        without = {name for name, gradient in found.items() if gradient is None or not gradient.any()}
        dead = without if dead is None else dead & without
        with torch.no_grad():
            for name, parameter in used.named_parameters():
                gradient = found.get(name)
                if gradient is not None:
                    parameter.sub_(1e-3 * gradient.nan_to_num() / gradient.abs().max().clamp_min(1e-30))
    for name in sorted(dead or ()):
        yield violation(
            f"the parameter {name} has no gradient at its initial value, nor after two steps: it stays there",
            "start it, or the parameter that multiplies it, at another value than zero",
            module,
            layer=layer,
        )


def _hooked(probe: Probe) -> Iterator[Violation]:
    """Hooks of parameters that change the gradient. A copy of a module has none, so the original is examined."""
    model = probe.build(probe.shape, tuple(probe.layers))
    for number, layer in enumerate(probe.layers):
        module = examined_part(model, number)
        declared = getattr(module, "surrogate_gradient", ())
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad or declared is True or name in declared:
                continue
            given = keyed_normal(3, name, parameter.shape).to(parameter)
            parameter.grad = None  # of another layer that shares it
            (parameter * given).sum().backward()
            if parameter.grad is None or not torch.equal(parameter.grad, given):
                yield violation(
                    f"a hook changes the gradient of {name}",
                    "remove the hook, or set a learning rate by optimizer_settings(); for a deliberate surrogate set "
                    f'`surrogate_gradient = ("{name}",)` on the module',
                    module,
                    layer=layer,
                )
                return


def _outside(layer: int, module: nn.Module, x_BTC: Tensor) -> Iterator[Violation]:
    """Trainable tensors that the module uses but does not have as parameters."""
    used = pristine(module)
    y_BTC = run(used, x_BTC, grad=True, copied=False)
    known = {id(parameter) for parameter in used.parameters()}
    others = [leaf for leaf in _leaves(y_BTC) if id(leaf) not in known]
    if others:
        yield violation(
            f"the output depends on a trainable tensor of shape {tuple(others[0].shape)} that is not a parameter of "
            "the module: it is neither trained nor saved",
            "assign it as torch.nn.Parameter, and modules in a list as torch.nn.ModuleList",
            module,
            layer=layer,
        )


def _leaves(y: Tensor) -> list[Tensor]:
    """The leaf tensors that autograd would give a gradient."""
    found, queue, visited = [], [y.grad_fn], set()
    while queue:
        node: Any = queue.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        queue += [following for following, _ in node.next_functions]
    return found


def _wrong(probe: Probe, layer: int, module: nn.Module) -> Iterator[Violation]:
    """Backward against the difference of the output along a direction, for the input and each parameter."""
    declared = getattr(module, "surrogate_gradient", ())
    if declared is True:
        return
    dtype, width = probe.dtypes[0], probe.shape.width
    working = working_dtype(module, width, dtype)
    if working not in STEPS:
        return
    step, allowed = STEPS[working]
    tokens = min(33, probe.ordinary)
    checked = ["x"] if "x" not in declared else []
    checked += [name for name, p in module.named_parameters() if p.requires_grad and name not in declared]
    weights = inputs(2, tokens, width, dtype, seed=7)

    for name in checked:
        errors = []
        for attempt in range(ATTEMPTS):
            x_BTC = inputs(2, tokens, width, dtype, seed=20 + attempt).clone().requires_grad_()
            used = pristine(module)
            value = x_BTC if name == "x" else dict(used.named_parameters())[name]
            y_BTC = run(used, x_BTC, grad=True, copied=False)
            if not y_BTC.requires_grad:
                return
            (gradient,) = torch.autograd.grad(
                (y_BTC * weights).sum(), value, allow_unused=True, materialize_grads=True
            )
            errors.append(_error(used, x_BTC.detach(), value, gradient, weights, step, working, attempt))
            if errors[-1] <= allowed:
                break
        else:
            what = "the input" if name == "x" else name
            yield violation(
                f"the gradient of {what} is wrong by {min(errors):.2g} of the change of the output along a direction",
                "correct the custom backward or remove detach; for a deliberate surrogate such as straight-through set "
                f'`surrogate_gradient = ("{name}",)` on the module, or True for all',
                module,
                layer=layer,
                size=min(errors),
            )
            return


@torch.no_grad()
def _error(
    used: nn.Module,
    x_BTC: Tensor,
    value: Tensor,
    gradient: Tensor,
    weights: Tensor,
    step: float,
    working: torch.dtype,
    attempt: int,
) -> float:
    """Relative difference of <gradient, d> from the central difference along a random direction d."""
    direction = keyed_normal(attempt, "direction", value.shape).to(value.dtype)
    size = float(value.norm())
    direction *= (size if size > 0 else 1.0) / direction.norm()
    start = value.detach().clone()
    ends = []
    for sign in (1, -1):
        moved = start + sign * step * direction
        if value.shape == x_BTC.shape and value.requires_grad and not isinstance(value, nn.Parameter):
            y = run(used, moved, grad=False, copied=False)
        else:
            value.copy_(moved)
            y = run(used, x_BTC, grad=False, copied=False)
            value.copy_(start)
        ends.append(y)
    numeric = float(((ends[0] - ends[1]) * weights).sum()) / (2 * step)
    analytic = float((gradient * direction).sum())
    noise = 100 * torch.finfo(working).eps * float((ends[0] * weights).norm()) / step
    return max(0.0, abs(numeric - analytic) - noise) / max(abs(numeric), abs(analytic), 1e-30)


def shared(probe: Probe) -> Iterator[Violation]:
    """No parameter of one layer is one of another layer, or lies in the memory of another parameter."""
    model = probe.build(probe.shape, tuple(probe.layers))
    owner: dict[Any, tuple[int, str, Tensor]] = {}
    keys: list[Callable[[Tensor], Any]] = [id, lambda p: p.untyped_storage().data_ptr()]
    for number, layer in enumerate(probe.layers):
        module = examined_part(model, number)
        declared = getattr(module, "shared_parameters", ())
        for name, parameter in module.named_parameters():
            if name in declared or not parameter.numel():
                continue
            for key in keys:
                first, other, same = owner.setdefault(key(parameter), (layer, name, parameter))
                if first != layer or same is not parameter:
                    yield violation(
                        f"the parameter {name} shares its memory with {other} of layer {first}: one update changes "
                        "both",
                        "create a parameter for each layer inside attention(layer, spec); for deliberate sharing set "
                        f'`shared_parameters = ("{name}",)` on the module',
                        module,
                        layer=layer,
                    )
                    return
