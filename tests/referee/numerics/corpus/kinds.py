"""Kinds of answers that readers found wrong: other masks, shifted indices, layouts, hidden code, ranks, threads."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from referee.numerics import Recorder, RecorderConfig
from tests.referee.numerics.corpus.cases import MODULES, NET, Case, Side
from tests.referee.numerics.corpus.clean import autocast
from tests.referee.numerics.corpus.nets import (
    Make,
    Net,
    X,
    changed,
    clean,
    fault,
    hidden,
    multihead,
    plain,
    step,
    within,
)

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(3))
RANDOM: Mapping[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "randn_like": lambda x: x + torch.randn_like(x),
    "normal": lambda x: x + torch.normal(torch.zeros_like(x), 1.0),
    "rand_like": lambda x: x * (torch.rand_like(x) > 0.5),
    "gumbel_softmax": F.gumbel_softmax,
    "dropout": lambda x: F.dropout(x, 0.5),
    "randperm": lambda x: x[:, torch.randperm(6)],
}


def random_mask(draw: Callable[[Tensor], Tensor], seed: int, factor: float) -> Make:
    """Return a model with a random operation, and behind it a hidden factor."""

    def forward(net: Any, x: Tensor) -> Tensor:
        torch.manual_seed(seed)
        return torch.as_tensor(net.b(hidden(net.a(draw(x)), factor)))

    return within(forward)


def sequence(*more: Callable[[], nn.Module], wrong: bool = False) -> Make:
    """Return layers, with more of them before the third; wrong: another weight of the fourth."""

    def build() -> nn.Module:
        layers = [nn.Linear(16, 16) for _ in range(3)]
        with torch.no_grad():
            layers[2].weight[3] += 0.01 * wrong
        return nn.Sequential(layers[0], nn.GELU(), *(make() for make in more), *layers[1:])

    return build


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def images(*layers: Callable[[], nn.Module]) -> Make:
    """Return layers for images, and a head for the mean of their result."""

    def build() -> nn.Module:
        return nn.Sequential(
            *(make() for make in layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
        )

    return build


def of_images(model: nn.Module) -> None:
    weight = next(model.parameters())
    last = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    x = IMAGES.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    torch.autograd.backward(model(x).square().mean())


def channels_last(make: Make) -> Make:
    return changed(make, lambda model: model.to(memory_format=torch.channels_last))


def heads(y: Tensor) -> Tensor:
    return y.view(2, 6, 4, 4).transpose(1, 2)


def compiled(how: str, factor: float) -> Make:
    """Return a model that a compiler computes wrongly by a factor: the model, a copy of it, or a function in it."""

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: [result * factor for result in graph(*args)]

    def build() -> nn.Module:
        torch._dynamo.reset()
        model: Any = within(plain)()
        if how == "function":
            gelu: Any = torch.compile(F.gelu, backend=backend)
            return within(lambda net, x: net.b(gelu(net.a(x))))()
        if how == "model":
            model.compile(backend=backend)
            return model
        return torch.compile(model, backend=backend)  # type: ignore[no-any-return]

    return build


def in_thread(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Return a forward that another thread computes."""

    def run(net: Any, x: Tensor) -> Tensor:
        results: list[Tensor] = []
        thread = threading.Thread(target=lambda: results.append(forward(net, x)))
        thread.start()
        thread.join()
        return results[0]

    return run


def relu(net: Any, x: Tensor) -> Tensor:
    return torch.as_tensor(net.b(F.relu(net.a(x))))


def raising(net: Any, x: Tensor) -> Tensor:
    y = F.gelu(net.a(x))
    raise ArithmeticError(f"{y.numel()} numbers are too many")


def caught(model: nn.Module) -> None:
    with contextlib.suppress(ArithmeticError):
        torch.autograd.backward(model(X).square().mean())


def merged(separate: bool) -> Make:
    """Return q, k and v of one layer or of three, and a product of them."""

    def build() -> nn.Module:
        whole = nn.Linear(16, 48)
        parts = [nn.Linear(16, 16) for _ in "qkv"]
        for part, weight, bias in zip(parts, whole.weight.chunk(3), whole.bias.chunk(3), strict=True):
            part.load_state_dict({"weight": weight, "bias": bias})
        if separate:
            made = {f"{name}_proj": part for name, part in zip("qkv", parts, strict=True)}
            return Net(lambda net, x: torch.tanh(net.q_proj(x) * net.k_proj(x) * net.v_proj(x)), **made)
        return Net(lambda net, x: torch.tanh(torch.stack(net.qkv(x).chunk(3, -1)).prod(0)), qkv=lambda: whole)

    return build


def batch_norm(momentum: float, shift: float = 0.0) -> Make:
    def build() -> nn.Module:
        norm = nn.BatchNorm1d(6, momentum=momentum)
        norm.running_mean += shift  # type: ignore[operator]
        return nn.Sequential(nn.Linear(16, 16), norm, nn.Linear(16, 16))

    return build


def zeros(value: float) -> Make:
    """Return a model with a constant beside its result: one of two zeros, which are equal as numbers."""
    return within(lambda net, x: (torch.full((3,), value) * 1, plain(net, x))[1])


def ranks(start: float = 0.0, norms: bool = True, clip: tuple[int, ...] = ()) -> Side:
    """Return two ranks in one process that average their gradients, over two steps.

    start: of a weight of rank 1. norms: whether the gradients of norms are averaged. clip: ranks that clip.
    """

    def recorded(folder: Path, settings: Mapping[str, Any]) -> Path:
        place = Path(tempfile.mkdtemp(dir=folder))
        models: list[Any] = []
        for rank in (0, 1):
            torch.manual_seed(0)
            models.append(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)))
            models[rank][0].weight.data[3] += start * rank
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        recorders = [Recorder(RecorderConfig(dump_path=str(place), **settings)) for _ in models]
        for number in (0, 1):
            losses = [model(X[rank] + number).square().mean() for rank, model in enumerate(models)]
            both = [
                torch.autograd.grad(loss, list(model.parameters()))
                for loss, model in zip(losses, models, strict=True)
            ]
            for rank, (model, recorder) in enumerate(zip(models, recorders, strict=True)):
                os.environ["RANK"] = str(rank)
                recorder.start(model)
                torch.autograd.backward(model(X[rank] + number).square().mean())
                for (name, p), one, other in zip(model.named_parameters(), *both, strict=True):
                    if norms or not name.startswith("1."):
                        p.grad.copy_((one + other) / 2)
                recorder.stop()
                if rank in clip:
                    nn.utils.clip_grad_norm_(model[1].parameters(), 1e-3)
                optimizers[rank].step()
                optimizers[rank].zero_grad()
                recorder.step()
        del os.environ["RANK"]
        return place

    return Side(recorded=recorded)


class Part(nn.Module):
    """A rank's part of two layers: columns of the first, rows of the second, and the sum over the ranks."""

    def __init__(self, whole: Any, rank: int, bias: bool) -> None:
        super().__init__()
        self.a, self.b, self.rest = nn.Linear(16, 8), nn.Linear(8, 16), torch.zeros(())
        part = slice(8 * rank, 8 * rank + 8)
        with torch.no_grad():
            self.a.weight.copy_(whole.a.weight[part])
            self.a.bias.copy_(whole.a.bias[part])
            self.b.weight.copy_(whole.b.weight[:, part])
            self.b.bias.copy_(whole.b.bias * bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(F.gelu(self.a(x)))
        with torch._C.DisableTorchFunction():
            return torch.as_tensor(y + self.rest)


def parallel(bias: tuple[bool, bool] = (True, False), reduced: bool = True) -> Side:
    """Return two ranks of a tensor parallel model. bias: ranks that add it. reduced: gradients of the layer before."""

    def recorded(folder: Path, settings: Mapping[str, Any]) -> Path:
        place = Path(tempfile.mkdtemp(dir=folder))
        torch.manual_seed(0)
        golden: Any = nn.Sequential(nn.Linear(16, 16), Net(plain))
        torch.autograd.backward(golden(X).square().mean())
        models: list[Any] = [
            nn.Sequential(copy.deepcopy(golden[0]), Part(golden[1], rank, bias[rank])) for rank in (0, 1)
        ]
        rest = [other(X).detach() for other in reversed(models)]
        for rank, model in enumerate(models):
            os.environ["RANK"] = str(rank)
            model[1].rest = rest[rank]
            recorder = Recorder(RecorderConfig(dump_path=str(place), **settings))
            recorder.start(model)
            torch.autograd.backward(model(X).square().mean())
            for mine, right in zip(model[0].parameters(), golden[0].parameters(), strict=True):
                mine.grad.copy_(right.grad if reduced else mine.grad)
            recorder.stop()
            recorder.step()
        del os.environ["RANK"]
        return place

    return Side(recorded=recorded)


def _masked() -> Iterator[Case]:
    """Another draw explains nothing behind it; a draw that is judged by its result accuses what uses it."""
    for name, draw in RANDOM.items():
        target, golden = random_mask(draw, 1, 1.5), random_mask(draw, 2, 1.0)
        title = f"another draw of {name}, and an error behind it"
        yield fault(title, "1", target, golden, call=name, hidden=(MODULES,))
    same = random_mask(RANDOM["dropout"], 1, 1.0)
    yield clean("the same draw of dropout", same, same)


def _compiled() -> Iterator[Case]:
    """A compiler that is wrong is refused or named, or the verdict says that the compiler is not in the record."""
    for how in ("model", "copy", "function"):
        yield fault(
            f"a wrong compiler of a {how}",
            "",
            compiled(how, 1.5),
            within(plain),
            verdict="refused|equal, incomplete|diverges",
        )


def _shifted() -> Iterator[Case]:
    """A layer more on one side shifts the indices of the others."""
    golden = sequence()
    for name, layer in (("Identity", nn.Identity), ("Dropout(0)", lambda: nn.Dropout(0.0))):
        yield clean(f"{name} in the middle", sequence(layer), golden)
        yield clean(f"{name} in the middle of the golden side", golden, sequence(layer))
    named = {"3": "2", "4": "3"}
    yield clean("Identity in the middle, with names", sequence(nn.Identity), golden, names=named)
    wrong = sequence(nn.Identity, wrong=True)
    yield fault("Identity in the middle, and another weight behind it", "3|4", wrong, golden, "parameter")
    before = within(lambda net, x: (net.b(x), plain(net, x))[1])
    yield clean("a layer called before, without a use of its result", before, within(plain))
    yield clean("a wrapper", lambda: Wrapped(golden()), golden, verdict="equal")
    yield clean("a wrapper, and q, k and v separate", lambda: Wrapped(merged(True)()), merged(False))
    yield clean("q, k and v separate", merged(True), merged(False))


def _written_otherwise() -> Iterator[Case]:
    """The same function with another layout, other optional results, another parametrisation, or in a thread."""
    norms: dict[str, Any] = {"BatchNorm": lambda: nn.BatchNorm2d(8), "GroupNorm": lambda: nn.GroupNorm(2, 8)}
    for name, norm in norms.items():
        model = images(lambda: nn.Conv2d(3, 8, 3), norm, nn.ReLU)
        yield clean(f"channels_last, {name}", channels_last(model), model, step=of_images)
    model = images(lambda: nn.Conv2d(3, 8, 3), lambda: nn.MaxPool2d(2), lambda: nn.Conv2d(8, 8, 2))
    yield clean("channels_last, pooling", channels_last(model), model, step=of_images)

    def attention(**options: bool) -> Make:
        return within(lambda net, x: net.b(net.att(x, x, x, **options)[0]), att=multihead)

    yield clean("need_weights", attention(need_weights=True), attention(need_weights=False))
    yield clean(
        "weights of each head", attention(average_attn_weights=False), attention(average_attn_weights=True)
    )
    one = within(plain)
    yield clean("weight_norm", changed(one, lambda model: parametrizations.weight_norm(model[1].a)), one)
    threaded = within(in_thread(plain))
    yield clean("a forward in a thread", threaded, one, verdict="equal")
    yield fault("ReLU in a thread", "1", within(in_thread(relu)), threaded)
    yield clean("zeros of another sign", zeros(0.0), zeros(-0.0), verdict="equal")
    yield clean("autocast on one side", one, one, around=autocast)
    yield fault("autocast on one side, and ReLU", "1", within(relu), one, around=autocast)
    yield fault("bfloat16 on one side, and ReLU", "1", changed(within(relu), lambda m: m.bfloat16()), one)


def _unrecorded() -> Iterator[Case]:
    """Code that no record shows, another order, exceptions and buffers."""
    one = within(plain)
    between = within(lambda net, x: net.b(hidden(net.a(x), 1.01)))
    linear = within(lambda net, x: net.b(net.a(x)))
    yield fault("hidden code between two layers", "1|1.b", between, linear, "changed|data")
    mixed = within(lambda net, x: net.b(heads(net.a(x)).reshape(2, 6, 16)))
    right = within(lambda net, x: net.b(heads(net.a(x)).transpose(1, 2).reshape(2, 6, 16)))
    yield fault("a reshape without its transpose", "1", mixed, right, hidden=(MODULES,))

    turned = X.flip(0)

    def flipped(model: nn.Module) -> None:
        torch.autograd.backward((model(turned) - X).square().mean())

    def straight(model: nn.Module) -> None:
        torch.autograd.backward((model(X) - X).square().mean())

    sides = (Side(model=one, step=step) for step in (flipped, straight))
    yield Case("inputs in another order than the labels", "", *sides, "data", kinds=(NET,), hidden=(MODULES,))
    yield fault("a forward that raises", "1", within(raising), one, step=caught, call="ArithmeticError")
    norm = batch_norm(0.1)
    twice: dict[str, Any] = {"steps": 2}
    yield fault("another momentum of BatchNorm", "1", batch_norm(0.9), norm, "setting|parameter", **twice)
    yield fault("another buffer", "1", batch_norm(0.1, 0.5), norm, "parameter")


def micro_batches(clipped: tuple[int, ...] = (2,), cast: str = "") -> Side:
    """Return a step of three micro-batches. clipped: after which of them. cast: autocast around "each" or "all"."""

    def run(model: nn.Module) -> None:
        with autocast() if cast == "all" else contextlib.nullcontext():
            for number in range(3):
                with autocast() if cast == "each" else contextlib.nullcontext():
                    torch.autograd.backward(F.mse_loss(model(X + number).float(), X))
                if number in clipped:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    return Side(model=within(plain), step=run)


def after_a_pass(model: nn.Module) -> None:
    with torch.no_grad():
        model(X)
    step(model)


def _of_micro_batches() -> Iterator[Case]:
    """A call that one side repeats shifts no pairs; weights that autocast has cast before have their gradients."""
    right = micro_batches()
    options: dict[str, Any] = {"call": "_foreach_mul_", "kinds": (NET,), "hidden": (MODULES,)}
    for name, clipped in (("each micro-batch", (0, 1, 2)), ("the first micro-batch too", (0, 2))):
        yield Case(f"clipping in {name}", "", micro_batches(clipped), right, "one side", **options)
    sides = micro_batches(cast="all"), micro_batches(cast="each")
    for name, (target, golden) in (("target", sides), ("golden side", sides[::-1])):
        title = f"autocast around all micro-batches of the {name}"
        yield Case(title, "", target, golden, verdict="equal", kinds=(NET,))
    cut = within(lambda net, x: net.b(F.gelu(F.linear(x, net.a.weight.detach(), net.a.bias))))
    whole = within(lambda net, x: net.b(F.gelu(F.linear(x, net.a.weight, net.a.bias))))
    lost: dict[str, Any] = {"kinds": (NET,), "direction": "backward", "hidden": (MODULES,)}
    casts = micro_batches((), "all"), micro_batches((), "each")
    sides = replace(casts[0], model=cut), replace(casts[1], model=whole)
    yield Case("a detached weight in autocast", "1", *sides, "one side", **lost)
    one = Side(model=within(plain), step=step)
    twice = Side(model=within(plain), step=after_a_pass)
    yield Case("a pass under no_grad before", "", twice, one, verdict="equal", kinds=(NET,))


def _of_ranks() -> Iterator[Case]:
    """Two ranks that average their gradients; the rank and the step that differ first are named."""
    right = ranks()
    for name, target, modules, call in (
        ("a rank starts from other weights", ranks(start=1e-3), "0", "step0/rank1"),
        ("norms clipped on one rank", ranks(clip=(0,)), "1", "step1/rank0"),
        ("norms clipped on the other rank", ranks(clip=(1,)), "1", "step1/rank1"),
        ("gradients of norms not reduced", ranks(norms=False), "1", "step0/rank"),
    ):
        yield Case(name, modules, target, right, direction="", kinds=(NET,), call=call)
    yield Case("two ranks", "", right, right, verdict="equal", kinds=(NET,))


def _of_parts() -> Iterator[Case]:
    """Two ranks of which each has a part of the weights, against one process: their tensors are merged."""
    golden = Side(model=lambda: nn.Sequential(nn.Linear(16, 16), Net(plain)), step=step)
    merged: dict[str, Any] = {"kinds": (NET,), "ranks": "merged"}
    yield Case("tensor parallel ranks", "", parallel(), golden, verdict="rounding", **merged)
    for name, target, module in (
        ("tensor parallel ranks that both add the bias", parallel((True, True)), "1.b"),
        ("tensor parallel ranks without a sum of gradients", parallel(reduced=False), "0"),
    ):
        yield Case(name, module, target, golden, direction="", **merged)


KINDS = (
    *_masked(),
    *_compiled(),
    *_shifted(),
    *_written_otherwise(),
    *_unrecorded(),
    *_of_micro_batches(),
    *_of_ranks(),
    *_of_parts(),
)
KIND_FAULTS = tuple(case for case in KINDS if case.verdict.endswith("diverges"))
KIND_PAIRS = tuple(case for case in KINDS if not case.verdict.endswith("diverges"))
