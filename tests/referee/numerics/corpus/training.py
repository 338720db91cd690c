"""Silent errors of training loops, by comparison with a good run, and the kinds of two published corpora (PUBLIC).

Each kind is retold in a few lines of these tests; nothing of the corpora is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.referee.numerics.corpus.cases import NET, Case, Side
from tests.referee.numerics.corpus.nets import Make, X, changed, fault, hidden, passed, plain, within

Loop = Callable[[Any, Any], Any]  # changes a model and its optimizer before the first step
LABELS = torch.arange(12).view(2, 6)
SCALE = 1024.0


def scaled(model: nn.Module) -> None:
    torch.autograd.backward(SCALE * model(X).square().mean())


def unscale(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= SCALE


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def in_order(*changes: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    return lambda model: [change(model) for change in changes] and None


def trained(change: Loop | None = None, model: Make | None = None, **options: Any) -> Side:
    """Return three steps of AdamW, with a change of the loop."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, eps=1e-3)
        if change:
            change(model, made)
        return made

    sides: dict[str, Any] = {"step": scaled, "after_backward": unscale, "steps": 3, **options}
    return Side(model=model or within(plain), optimizer=optimizer, **sides)


def rates(*factors: float) -> Loop:
    """Return a schedule: factors of the learning rate of each step."""

    def change(model: Any, optimizer: Any) -> None:
        left = iter(factors)

        def set_rate(made: Any, *given: Any) -> None:
            factor = next(left)
            for group in made.param_groups:
                group["lr"] = 1e-2 * factor

        optimizer.register_step_pre_hook(set_rate)

    return change


def keep_gradients(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad = lambda: None


def replace_weight(model: Any, optimizer: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def leave_out(name: str) -> Loop:
    """Return a loop whose optimizer has not the weight of a module."""

    def change(model: Any, optimizer: Any) -> None:
        lost = model.get_submodule(name).weight
        group = optimizer.param_groups[0]
        group["params"] = [parameter for parameter in group["params"] if parameter is not lost]

    return change


def frozen(model: Any) -> None:
    model[1].requires_grad_(False)


def labelled(padding: int) -> Callable[[nn.Module], None]:
    """Return a step whose last labels are padding, which counts unless it is ignored."""
    labels = LABELS.clone()
    labels[:, 4:] = padding

    def run(model: nn.Module) -> None:
        torch.autograd.backward(SCALE * F.cross_entropy(model(X).flatten(0, 1), labels.flatten()))

    return run


def on(x: Tensor) -> Callable[[nn.Module], None]:
    return lambda model: torch.autograd.backward(model(x).square().mean())


def recomputed(other: bool) -> Callable[[Any, Tensor], Tensor]:
    """Recompute a layer in backward, of its input or of another one, as a wrong buffer gives."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.as_tensor(net.b(Recomputed.apply(net.a(x), other)))

    return forward


class Recomputed(torch.autograd.Function):
    """GELU whose backward computes with another input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: bool) -> Tensor:
        ctx.save_for_backward(x.roll(1, 0) if other else x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (gradient,) = torch.autograd.grad(F.gelu(x), x, received[0])
        return gradient, None


def _loops() -> Iterator[Case]:
    right = trained()

    def loop(
        name: str, modules: str, target: Side, golden: Side = right, call: str = "step1", **options: Any
    ) -> Case:
        return Case(name, modules, target, golden, kinds=(NET,), call=call, **options)

    yield loop("zero_grad forgotten", "", trained(keep_gradients), direction="")
    yield loop("the optimizer holds a weight that was replaced", "0", trained(replace_weight))
    yield loop("a weight that the optimizer was never given", "1.a", trained(leave_out("1.a")))
    cold = trained(model=changed(within(plain), frozen))
    yield loop(
        "layers that train though they should be frozen", "1|1.a|1.b", right, cold, "step0", direction=""
    )
    twice, once = trained(rates(1, 0.25, 0.0625)), trained(rates(1, 0.5, 0.25))
    yield loop("a scheduler that steps twice", "0", twice, once, "step2")
    jump, level = trained(rates(1, 100, 1)), trained(rates(1, 1, 1))
    yield loop("the learning rate times 100 in one step", "0", jump, level, "step2")
    early, late = (trained(after_backward=in_order(*order)) for order in ((clip, unscale), (unscale, clip)))
    yield loop("clipping before the loss is unscaled", "0", early, late)
    yield loop("no unscaling of the loss", "", trained(after_backward=None), direction="")
    padded = (trained(step=labelled(padding)) for padding in (0, -100))
    yield loop("padding in the loss", "", *padded, call="step0", direction="", evidence="data|setting")


def _public() -> Iterator[Case]:
    one = within(plain)
    norm = changed(one, lambda model: parametrizations.spectral_norm(model[1].a))
    cold, warm = (
        changed(norm, lambda model: model.eval()),
        changed(norm, lambda model: (model(X), model.eval())),
    )
    yield fault(
        "spectral_norm before its first step", "1.a.parametrizations.weight.0", cold, warm, "parameter"
    )
    dropping = within(lambda net, x: F.dropout(plain(net, x), 0.1))
    yield fault(
        "dropout in evaluation", "1", *(changed(make, lambda model: model.eval()) for make in (dropping, one))
    )
    again = changed(one, lambda model: model[1].a.reset_parameters())
    yield fault("weights initialised twice", "1.a", again, one, "parameter")
    longer = within(lambda net, x: net.b(plain(net, x)))
    yield fault("more calls than the limit of new tokens", "1", longer, one)
    for name, batch in (
        ("one sample in place of two", X[:1]),
        ("one sample in each row", X[:1].expand(2, 6, 16)),
    ):
        wrong, right = (Side(model=one, step=on(x)) for x in (batch, X))
        yield Case(name, "|0", wrong, right, "data", kinds=(NET,))
    masks = (
        within(lambda net, x, end=end: net.b(net.a(x) * (torch.arange(6) < end)[:, None])) for end in (3, 4)
    )  # type: ignore[misc]
    yield fault("a wrong mask of a part of the vocabulary", "1", *masks)
    makes = (within(recomputed(other)) for other in (True, False))
    yield fault("recomputation of another input", "1", *makes, direction="backward")
    scales = (within(lambda net, x, by=by: passed(plain(net, x), by)) for by in (0.5, 1.0))  # type: ignore[misc]
    yield fault("a wrong scale of the gradient of a part", "1|1.b", *scales, direction="backward")
    stages = (within(lambda net, x: net.b(x)), within(lambda net, x: net.b(net.a(x))))
    yield fault("a layer of another stage", "1|1.a", *stages, "one side")
    sums = (within(lambda net, x, by=by: net.b(hidden(net.a(x), by))) for by in (0.5, 1.0))  # type: ignore[misc]
    yield fault("half of a sum over ranks", "1|1.b", *sums)


TRAINING = (*_loops(), *_public())
# A reproduction of a corpus -> the case of its kind. TrainCheck: the 18 of its evaluation that are described.
LOST, UNREDUCED = "gradient lost before the reduction on one rank", "gradients of norms not reduced"
PUBLIC = {
    "TrainCheck": {
        "baichuan2-86": LOST,
        "pytorch-84803": LOST,
        "pytorch-96600": LOST,
        "deepspeed-1801": "norms clipped on one rank",
        "lightning-thunder-725": "one layer in bfloat16",
        "mmpretrain-702": "layers that train though they should be frozen",
        "pytorch-51800": "spectral_norm before its first step",
        "pytorch-104336": UNREDUCED,
        "x-jxmnop-ddp-out-of-sync": UNREDUCED,
        "pytorch-115607": "a wrong compiler of a model",
        "pytorch-forum-84911": "a weight that the optimizer was never given",
        "stackoverflow-60335387": "zero_grad forgotten",
        "stackoverflow-67180955": "one sample in each row",
        "transformers-17877": "weights initialised twice",
        "transformers-23723": "more calls than the limit of new tokens",
        "transformers-33844": "dropout in evaluation",
        "transformers-34204": "one sample in place of two",
    },
    "TTrace": {
        "tensor parallel, mask of the embedding": "a wrong mask of a part of the vocabulary",
        "recomputed activations, their input": "recomputation of another input",
        "context parallel, scale of the loss": "gradient not averaged",
        "data parallel, scale of the loss": "no unscaling of the loss",
        "sharded optimizer, embedding and head": "embedding not tied",
        "sharded optimizer, parameters not updated": "a weight that the optimizer was never given",
        "sequence parallel, router": UNREDUCED,
        "sequence parallel, norms": UNREDUCED,
        "tensor and context parallel, norms": "a wrong gradient of a norm, other kernels",
        "context parallel, attention": "a wrong scale of the gradient of a part",
        "pipeline parallel, division into stages": "a layer of another stage",
        "tensor parallel, overlapped reduction": "half of a sum over ranks",
    },
}
NOT_ON_A_CPU = {
    "TrainCheck deepspeed-5794": "experts of several workers exchange unequal numbers of tokens: a hang, no number",
    "TTrace tensor parallel, cast to FP8": "no product of FP8 tensors on a CPU",
    "TTrace tensor parallel, group of FP8 scales": "no product of FP8 tensors on a CPU",
}
