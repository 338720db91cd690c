"""Clean pairs of small models: the same function in two forms, orders, kernels or formats.

Calls of one name have the same operands on both sides: two programs that share no more than the result are no pair.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.referee.numerics.corpus.cases import NET, Case, Side
from tests.referee.numerics.corpus.clean import autocast, math_attention, no_mkldnn, threads
from tests.referee.numerics.corpus.kinds import Wrapped
from tests.referee.numerics.corpus.nets import X, changed, clean, plain, within
from tests.referee.numerics.corpus.training import in_order, on, trained, unscale

Forward = Callable[[Any, Tensor], Any]


def written_norm(y: Tensor) -> Tensor:
    return (y - y.mean(-1, keepdim=True)) * (y.var(-1, False, keepdim=True) + 1e-5).rsqrt()


def functional(model: nn.Module) -> None:
    torch.autograd.backward(functional_call(model, dict(model.named_parameters()), X).square().mean())


# The same function of layers a and b: two forms of a forward.
FORMS: dict[str, tuple[Forward, Forward]] = {
    "a function in place of a module": (lambda n, x: F.linear(F.gelu(n.a(x)), n.b.weight, n.b.bias), plain),
    "addmm in place of linear": (
        lambda n, x: torch.addmm(n.b.bias, n.a(x).flatten(0, 1), n.b.weight.t()).view(2, 6, 16),
        lambda n, x: n.b(n.a(x)),
    ),
    "a checkpoint": (lambda n, x: n.b(checkpoint(lambda y: F.gelu(n.a(y)), x, use_reentrant=False)), plain),
    "a reentrant checkpoint": (
        lambda n, x: n.b(
            checkpoint(lambda y: F.gelu(n.a(y)), x.clone().requires_grad_(), use_reentrant=True)
        ),
        lambda n, x: n.b(F.gelu(n.a(x.clone().requires_grad_()))),
    ),
    "in place": (lambda n, x: n.b(F.relu_(n.a(x).clone())), lambda n, x: n.b(F.relu(n.a(x).clone()))),
    "an operator in place of a method": (lambda n, x: n.b(n.a(x) + 1.0), lambda n, x: n.b(n.a(x).add(1.0))),
    "two independent layers in the other order": (
        lambda n, x: (lambda second, first: first + second)(n.b(x), n.a(x)),
        lambda n, x: n.a(x) + n.b(x),
    ),
    "contiguous memory": (
        lambda n, x: n.b(n.a(x).transpose(0, 1).contiguous().transpose(0, 1)),
        lambda n, x: n.b(n.a(x)),
    ),
    "reshape in place of view": (
        lambda n, x: n.b(n.a(x).reshape(12, 16)),
        lambda n, x: n.b(n.a(x).view(12, 16)),
    ),
    "einsum in place of matmul": (
        lambda n, x: n.b(torch.einsum("bti,oi->bto", n.a(x), n.a.weight)),
        lambda n, x: n.b(n.a(x) @ n.a.weight.t()),
    ),
    "a norm written out": (
        lambda n, x: n.b(written_norm(n.a(x))),
        lambda n, x: n.b(F.layer_norm(n.a(x), (16,))),
    ),
    "softmax of logarithms": (
        lambda n, x: n.b(F.log_softmax(n.a(x), -1).exp()),
        lambda n, x: n.b(F.softmax(n.a(x), -1)),
    ),
    "a dict of results": (lambda n, x: {"y": plain(n, x)}["y"], plain),
    "an unused branch": (lambda n, x: (plain(n, x), x.sum())[0], plain),
    "an unused branch under no_grad": (lambda n, x: (plain(n, x), torch.no_grad()(n.a)(x * 2))[0], plain),
    "a print of a value": (lambda n, x: (n.a(x).mean().item(), plain(n, x))[1], plain),
    "complex numbers in place of a rotation": (
        lambda n, x: n.b(torch.view_as_real(torch.view_as_complex(n.a(x).view(2, 6, 8, 2)) * 1j).flatten(2)),
        lambda n, x: n.b(
            (lambda y: torch.stack([-y[..., 1], y[..., 0]], -1))(n.a(x).view(2, 6, 8, 2)).flatten(2)
        ),
    ),
    "attention written out": (
        lambda n, x: n.b(F.softmax(n.a(x) @ x.transpose(1, 2) * 0.25, -1) @ x),
        lambda n, x: n.b(F.scaled_dot_product_attention(n.a(x), x, x, scale=0.25)),
    ),
    "a clone": (lambda n, x: plain(n, x.clone()), plain),
    "empty tensors": (lambda n, x: torch.cat([plain(n, x), x[:0]]), plain),
}


def both_losses(first: bool) -> Callable[[nn.Module], None]:
    """Run backward of two losses in either order."""

    def run(model: nn.Module) -> None:
        y = model(X)
        losses = [y.square().mean(), y.abs().mean()]
        for loss in losses if first else reversed(losses):
            torch.autograd.backward(loss, retain_graph=True)

    return run


def accumulated(parts: int) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        for part in torch.cat([X, X + 1, X * 2]).split(6 // parts):
            torch.autograd.backward(model(part).square().mean() / parts)

    return run


def hooked(model: Any) -> None:
    model[1].a.register_forward_hook(lambda module, args, output: None)
    model[0].weight.register_hook(lambda gradient: None)


def _pairs() -> Iterator[Case]:
    one = within(plain)
    for name, (first, second) in FORMS.items():
        yield clean(name, within(first), within(second))
    for name, around in (
        ("two threads", lambda: threads(2)),
        ("oneDNN off", no_mkldnn),
        ("another attention kernel", math_attention),
    ):
        yield clean(f"a small model, {name}", one, one, around=around)
    for name, change in (
        ("hooks that change nothing", hooked),
        ("a copy of the model", lambda model: copy.deepcopy(model)),
        ("evaluation without dropout", lambda model: model.eval()),
        ("bfloat16 on one side", lambda model: model.bfloat16()),
        ("float64 on one side", lambda model: model.double()),
        ("contiguous parameters", lambda model: [p.set_(p.clone()) for p in model.parameters()]),  # type: ignore[call-overload]
    ):
        yield clean(name, changed(one, change), one)
    for name, target, golden in (
        ("two backward passes in the other order", both_losses(False), both_losses(True)),
        ("three micro-batches against two", accumulated(3), accumulated(2)),
        ("six micro-batches against one", accumulated(6), accumulated(1)),
        ("a functional call", functional, on(X)),
        ("a sum in place of a mean", lambda model: (model(X).square().sum() / 192).backward(), on(X)),
        ("autocast on both sides", autocast()(on(X)), autocast()(on(X))),
    ):
        sides = (Side(model=one, step=run) for run in (target, golden))
        yield Case(name, "", *sides, verdict="rounding", kinds=(NET,))
    foreach = trained(lambda model, made: [group.update(foreach=False) for group in made.param_groups])
    for name, target in (
        ("AdamW without foreach", foreach),
        ("steps with other kernels", trained(around=no_mkldnn)),
        ("steps of a wrapped model", trained(model=lambda: Wrapped(one()))),
        ("unscaling in two halves", trained(after_backward=in_order(halve(2.0), unscale, halve(0.5)))),
    ):
        yield Case(name, "", target, trained(), verdict="rounding", kinds=(NET,))


def halve(factor: float) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= factor

    return run


SOUND = tuple(_pairs())
