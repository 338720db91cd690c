"""Faults and clean pairs of small models: one structure each, in a few lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.referee.numerics.corpus.cases import CHECKSUMS, MODULES, NET, Case, Side
from tests.referee.numerics.corpus.clean import no_mkldnn
from tests.referee.numerics.corpus.faults import BACKWARD

X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
AIM = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(2))
Make = Callable[[], nn.Module]


def step(model: nn.Module) -> None:
    x = X.to(next(model.parameters()).dtype)
    torch.autograd.backward(model(x).float().square().mean())


def aimed(model: nn.Module) -> None:
    """A loss that no normalisation cancels."""
    torch.autograd.backward((model(X) - AIM).square().mean())


def fault(name: str, modules: str, target: Make, golden: Make, evidence: str = "", **options: Any) -> Case:
    """Return a fault of a small model. step, optimizer, ...: of both sides."""
    sides = {key: options.pop(key) for key in ("step", "optimizer", "steps") if key in options}
    sides = {"step": step, **sides}
    around = options.pop("around", contextlib.nullcontext)
    wrong, right = Side(model=target, around=around, **sides), Side(model=golden, **sides)
    return Case(name, modules, wrong, right, evidence, kinds=(NET,), **options)


def clean(name: str, target: Make, golden: Make, **options: Any) -> Case:
    return fault(name, "", target, golden, **{"verdict": "rounding", **options})


class Net(nn.Module):
    """Two layers, a and b, and a forward of the module and x."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        for name, part in parts.items():
            self.add_module(name, part if isinstance(part, nn.Module) else part())
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def within(forward: Callable[[Any, Tensor], Tensor], **parts: Any) -> Make:
    """Return a Net between two layers, as module 1."""
    return lambda: nn.Sequential(nn.Linear(16, 16), Net(forward, **parts), nn.Linear(16, 16))


def plain(net: Any, x: Tensor) -> Tensor:
    return torch.as_tensor(net.b(F.gelu(net.a(x))))


def changed(make: Make, change: Callable[[Any], Any]) -> Make:
    """Return what makes a model with a change."""

    def build() -> nn.Module:
        model = make()
        with torch.no_grad():
            change(model)
        return model

    return build


def hidden(y: Tensor, factor: float) -> Tensor:
    """Multiply by an operation that no torch function shows, as one of an extension."""
    with torch._C.DisableTorchFunction():
        return y * factor


class Passed(torch.autograd.Function):
    """The identity, whose gradient has a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> tuple[Tensor, None]:
        return received[0] * ctx.factor, None


passed: Any = Passed.apply


class WrongNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(passed(x, 1.02))


def without_gradient(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = net.a(x)
    return torch.as_tensor(net.b(F.gelu(x)))


def ending(norm: Make) -> Make:
    return lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), norm())


def attention(net: Any, x: Tensor) -> Tensor:
    return torch.as_tensor(net.b(net.att(x, x, x, need_weights=False)[0]))


def multihead() -> nn.Module:
    return nn.MultiheadAttention(16, 2, batch_first=True)


def coarse(other: bool) -> Callable[[Any, Tensor], Tensor]:
    """Round to bfloat16, to the other neighbour of each element or not."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).bfloat16()
        return (torch.nextafter(y, torch.zeros_like(y)) if other else y).float()

    return forward


def convolution() -> nn.Module:
    """Return layers whose first bias has a gradient of zero but for rounding."""
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8 * 64, 10))


def clipped(most: float) -> Callable[[nn.Module], None]:
    """Return a whole step within a record: backward, clipping and AdamW."""

    def run(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        images = torch.linspace(-3, 3, 768).sin().view(4, 3, 8, 8)
        torch.autograd.backward(F.cross_entropy(model(images), torch.arange(4)))
        nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()

    return run


def scaled(model: nn.Module) -> None:
    """Run a step in bfloat16 with a GradScaler, whose parameters' gradients are float32."""
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-3), torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(X).float().square().mean()
    torch.autograd.backward(scaler.scale(loss))
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def faults() -> Iterator[Case]:
    one = within(plain)
    backward: dict[str, Any] = {"evidence": "one side", "direction": BACKWARD}
    frozen = changed(one, lambda model: model[1].a.requires_grad_(False))
    yield fault("a frozen layer", "1.a", frozen, one, **backward)
    yield fault("a layer under no_grad", "1|1.a", within(without_gradient), one, **backward)
    cut = within(lambda net, x: plain(net, x.detach()))
    yield fault("a detached input", "1|1.a", cut, one, **backward)
    cut = within(lambda net, x: plain(net, x).detach())
    yield fault("a detached result", "1|1.b", cut, one, **backward)
    more = within(lambda net, x: net.norm(plain(net, x)), norm=lambda: nn.LayerNorm(16))
    yield fault("an added layer", "1.norm", more, one, "one side")
    twice = within(lambda net, x: net.b(plain(net, x)))
    yield fault("a layer called once more", "1", twice, one)
    att = within(attention, att=multihead)
    weight = changed(att, lambda model: model[1].att.out_proj.weight[2, 3].add_(0.2))
    yield fault("a weight of a layer that is not called", "1.att.out_proj", weight, att, "parameter")
    borrowed = within(lambda net, x: F.linear(x, net.b.weight))
    weight = changed(borrowed, lambda model: model[1].b.weight[2, 3].add_(0.2))
    yield fault("a weight that another module computes with", "1.b", weight, borrowed, "parameter")
    phases = [
        within(lambda net, x, by=by: torch.fft.irfft(torch.fft.rfft(x) * by, n=16))  # type: ignore[misc]
        for by in (1.02, 1.0)
    ]
    yield fault("a factor of a complex tensor", "1", phases[0], phases[1], "setting|changed|computed")
    norms = [ending(lambda norm=norm: norm(16)) for norm in (WrongNorm, nn.LayerNorm)]  # type: ignore[misc]
    yield fault(
        "a wrong gradient of a norm, other kernels",
        "3",
        *norms,
        step=aimed,
        direction=BACKWARD,
        around=no_mkldnn,
    )
    coarse_gelu, right = (
        lambda other=other, kind=kind: nn.Sequential(Net(coarse(other)), nn.GELU(kind))  # type: ignore[misc]
        for other, kind in ((True, "tanh"), (False, "none"))
    )
    values = (CHECKSUMS, MODULES)
    yield fault("other GELU behind rounding", "1", coarse_gelu, right, hidden=values)


def more_clipping() -> Case:
    target, golden = (Side(model=convolution, step=clipped(most)) for most in (3.0, 1.0))
    return Case(
        "another clipping within the record", "", target, golden, "setting", kinds=(NET,), hidden=(MODULES,)
    )


def pairs() -> Iterator[Case]:
    one = within(plain)
    beside = within(lambda net, x: (plain(net, x), net.b(x))[0])
    yield clean("a layer called once more, without a use of its result", beside, one)
    yield clean("an Identity at the end", lambda: nn.Sequential(*one(), nn.Identity()), one)  # type: ignore[arg-type]
    norm = ending(lambda: nn.LayerNorm(16))
    kernels: dict[str, Any] = {"around": no_mkldnn}
    yield clean("a loss that a norm cancels, other kernels", norm, norm, **kernels)
    coarse_norm = changed(norm, lambda model: model.bfloat16())
    yield clean("a loss that a norm cancels, bfloat16", coarse_norm, norm)
    yield clean("clipping and AdamW, other kernels", convolution, convolution, step=clipped(1.0), **kernels)
    yield clean("autocast, scaler and AdamW, other kernels", norm, norm, step=scaled, **kernels)


NET_FAULTS, NET_PAIRS = (*faults(), more_clipping()), tuple(pairs())
