"""Fixed modules whose forward changes buffers or attributes have the gradients and the state of unfixed ones."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from numerics import NumericsError
from numerics.search.fix_words import fix

WIDTH = 6


class Counter(nn.Module):
    """Multiplies by a number that each call changes. how: in place, by assignment, or outside of buffers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), how
        self.number, self.steps = 0, [0]
        self.plain = torch.zeros(())
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.how == "in place":
            self.count += 1
            return y * self.count.clone()  # the next call overwrites it
        if self.how == "assigned":
            self.count = self.count + 1
            return y * self.count
        if self.how == "used before":
            y = y * (self.count + 1)
            self.count.add_(y.detach().mean())
            return y
        if self.how == "attribute":
            self.number += 1
            return y * self.number
        if self.how == "list":
            self.steps.append(1)
            return y * len(self.steps)
        if self.how == "tensor":
            self.plain += 1
            return y * self.plain.clone()
        return y * torch.randint(1, 9, (WIDTH,), generator=self.generator)


class DataDependent(nn.Module):
    """A running mean that is applied after its update, as in quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return torch.tanh(y - self.mean)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
    "batch norm, cumulative": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)),
    "spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "data-dependent": DataDependent,
} | {
    how: (lambda how=how: Counter(how))  # type: ignore[misc]
    for how in ("in place", "assigned", "used before", "attribute", "list", "tensor", "generator")
}  # fmt: skip


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(MODULES[name]()), nn.Linear(WIDTH, 2))


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, WIDTH, generator=generator) for _ in range(3)]


def in_turn(model: nn.Module) -> None:
    """Run the backward of each micro-batch before the next forward."""
    for x in inputs():
        model(x).square().mean().backward()


def together(model: nn.Module) -> None:
    """Call the module several times before the one backward."""
    torch.stack([model(x).square().mean() for x in inputs()]).sum().backward()


def reversed_order(model: nn.Module) -> None:
    """Run the backwards in the order opposite to the forwards, in evaluation mode."""
    losses = [model(x).square().mean() for x in inputs()]
    model.eval()
    for loss in reversed(losses):
        loss.backward()
    model.train()


def without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        model(inputs()[0])
    in_turn(model)


@pytest.mark.parametrize("words", ["upcast:1", "upcast:1.0", "cpu:1", "small:1", "upcast:1 small:1.0"])
@pytest.mark.parametrize("order", [in_turn, together, reversed_order, without_gradients])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_and_state_are_those_without_the_fix(
    name: str, order: Callable[[nn.Module], None], words: str
) -> None:
    model = model_of(name)
    plain = copy.deepcopy(model)
    order(plain)
    with fix(model, words):
        order(model)
    for (path, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype == other.grad.dtype
        torch.testing.assert_close(
            one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=lambda text, path=path: f"{path}: {text}"
        )
    for (path, one), other in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert one.dtype == other[1].dtype
        torch.testing.assert_close(one, other[1], msg=lambda text, path=path: f"{path}: {text}")
    part, unfixed = model.get_submodule("1.0"), plain.get_submodule("1.0")
    if isinstance(part, Counter) and isinstance(unfixed, Counter):
        assert (part.number, part.steps) == (unfixed.number, unfixed.steps)
        assert torch.equal(part.plain, unfixed.plain)
        assert torch.equal(part.generator.get_state(), unfixed.generator.get_state())


@pytest.mark.parametrize("size_average", [None, True, False])
@pytest.mark.parametrize("reduce", [None, True, False])
def test_small_cross_entropy_honours_the_names_before_reduction(
    size_average: bool | None, reduce: bool | None
) -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(x, y, size_average=size_average, reduce=reduce, reduction="sum")

    model = nn.ModuleDict({"loss": Loss()})
    x, y = inputs()[0], torch.tensor([0, 1, 2, 3, 2])
    plain = model["loss"](x, y)
    with fix(model, "small:loss") as applied:
        found = model["loss"](x, y)
        applied.require_used()
    torch.testing.assert_close(found, plain)


def test_a_complex_module_has_double_accuracy_and_complex_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.complex64))
    exact = copy.deepcopy(model).to(torch.complex128)
    x = torch.randn(9, 64, dtype=torch.complex64)
    direction = torch.randn(9, 64, dtype=torch.complex64)
    true = exact(x.to(torch.complex128))
    wanted = torch.autograd.grad(true, list(exact.parameters()), direction.to(torch.complex128))
    with fix(model, "upcast:0"):
        result = model(x)
        found = torch.autograd.grad(result, list(model.parameters()), direction)
    assert result.dtype == torch.complex64
    assert torch.equal(result, true.to(torch.complex64))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.complex64
        torch.testing.assert_close(one.to(torch.complex128), other, rtol=1e-6, atol=1e-6)


class Generating(nn.Module):
    def forward(self, x: Tensor) -> object:
        return (x * factor for factor in range(3))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (lambda: nn.Embedding(9, WIDTH, sparse=True), "upcast:0", "upcast:0: 0 has sparse gradients"),
        (lambda: nn.EmbeddingBag(9, WIDTH, sparse=True), "cpu:0", "cpu:0: 0 has sparse gradients"),
        (lambda: nn.Sequential(nn.Embedding(9, WIDTH, sparse=True)), "upcast:0.embedding", "0.0 has sparse gradients"),
        (lambda: torch.jit.script(nn.Linear(WIDTH, WIDTH)), "upcast:0", "0 is a module of torch.jit"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH))), "cpu:0", "0.0 is a module of torch.jit"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_fixed_is_refused_in_one_line(
    make: Callable[[], nn.Module], words: str, message: str
) -> None:
    model = nn.Sequential(make())
    former = type(model[0])
    with pytest.raises(NumericsError, match=f"{message}.*; fix: ") as caught:
        fix(model, words)
    assert "\n" not in str(caught.value)
    assert type(model[0]) is former


@pytest.mark.parametrize("grad", [True, False])
def test_a_generator_as_result_is_refused(grad: bool) -> None:
    model = nn.Sequential(Generating())
    with (
        fix(model, "upcast:0"),
        pytest.raises(NumericsError, match=r"0 returns a generator, .*; fix: return a list"),
    ):
        model(torch.ones(2, requires_grad=grad))


def test_small_words_and_other_functions_accept_sparse_embeddings() -> None:
    model = nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), nn.GELU())
    with fix(nn.Sequential(model), "small:0 upcast:0.gelu"):
        model(torch.tensor([1, 2])).sum().backward()
    assert model[0].weight.grad is not None
    assert model[0].weight.grad.is_sparse


@dataclasses.dataclass
class Scores:
    logits: Tensor
    extra: object = None


class Holder:
    def __init__(self, logits: Tensor) -> None:
        self.parts = {"logits": [logits]}


class Scoring(nn.Module):
    """Returns its numbers in a dataclass, an object or a distribution."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Tensor) -> object:
        y = self.linear(x)
        if self.kind == "dataclass":
            return Scores(y, {"inner": Scores(y * 2)})
        return Holder(y) if self.kind == "object" else torch.distributions.Normal(y, y.exp())


class Scored(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.scoring = Scoring(kind)

    def forward(self, x: Tensor) -> Tensor:
        found = self.scoring(x)
        if isinstance(found, Scores):
            assert isinstance(found.extra, dict)
            return found.logits.square().mean() + found.extra["inner"].logits.mean()
        if isinstance(found, Holder):
            return found.parts["logits"][0].square().mean()
        loss: Tensor = -found.log_prob(torch.zeros(WIDTH)).mean()
        return loss


@pytest.mark.parametrize("kind", ["dataclass", "object", "distribution"])
@pytest.mark.parametrize("word", ["small", "upcast"])
def test_results_in_objects_keep_their_gradients_and_formats(kind: str, word: str) -> None:
    torch.manual_seed(0)
    model, x = Scored(kind), torch.randn(3, WIDTH)
    weight = model.scoring.linear.weight
    plain = model(x)
    plain.backward()
    expected, weight.grad = weight.grad, None
    with fix(model, f"{word}:scoring"):
        loss = model(x)
        loss.backward()
    assert loss.dtype == plain.dtype
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected)


def test_what_a_fix_cannot_compute_is_one_line() -> None:
    lazy = nn.Sequential(nn.LazyLinear(WIDTH))
    with pytest.raises(
        NumericsError, match=r"0 has parameters without a shape; fix: call the model once before"
    ):
        fix(lazy, "upcast:0")
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH)), torch.randn(3, WIDTH, requires_grad=True)
    with fix(model, "upcast:0"):
        with pytest.raises(NumericsError, match=r"0 is called within a function of torch.func"):
            torch.vmap(model)(x)
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative; fix: remove the fix"):
            gradient.sum().backward()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)  # of a constant
        with pytest.raises(RuntimeError, match="no second derivative; fix: remove the fix"):
            gradient.sum().backward()
