"""Fixed modules: results, gradients and state against float64, explicit casts, and the model without a fix."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from referee.numerics import NumericsError, fix
from tests.referee.numerics.search.small_models import WIDTH, Block, error, model_of, step

WORDS = [
    "small:blocks.*", "small:*.gelu", "small:blocks.1.attention.attention", "upcast:blocks.1.mlp", "upcast:wte",
    "upcast:*.scaled_dot_product_attention", "upcast:blocks.0 small:blocks.0.mlp", "cpu:blocks.0.mlp", "upcast:.",
]  # fmt: skip


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("words", WORDS)
def test_a_fixed_model_has_the_loss_and_gradients_of_float64(words: str, recompute: bool) -> None:
    true_loss, true = step(model_of().double())
    model = model_of(recompute=recompute)
    plain, gradients = step(model)
    gradients = {name: one.clone() for name, one in gradients.items()}
    with fix(model, words) as applied:
        loss, found = step(model)
        if not words.startswith("cpu"):  # no tensor is on another device
            applied.require_used()
        assert found.keys() == true.keys() == gradients.keys()
        assert error(loss, true_loss) < 1e-6
        for name, gradient in found.items():
            assert gradient.dtype == torch.float32
            assert error(gradient, true[name]) < 3e-6, name
            assert not words.startswith("cpu") or torch.equal(gradient, gradients[name])
    again, restored = step(model)
    assert torch.equal(again, plain)
    assert all(torch.equal(restored[name], gradients[name]) for name in gradients)
    assert type(model.blocks[0]) is Block


class Cast(nn.Module):
    """Calls a module with explicit casts: an independent implementation of `upcast`."""

    def __init__(self, inner: nn.Module, wide: torch.dtype) -> None:
        super().__init__()
        self.inner, self.wide = inner, wide

    def forward(self, x: Tensor) -> Tensor:
        parameters = {name: one.to(self.wide) for name, one in self.inner.named_parameters()}
        with torch.autocast("cpu", enabled=False):
            y: Tensor = torch.func.functional_call(self.inner, parameters, x.to(self.wide))
        return y if torch.is_autocast_enabled("cpu") else y.to(x.dtype)


@pytest.mark.parametrize("path", ["blocks.0.mlp", "blocks.1.attention"])
@pytest.mark.parametrize("half", ["", "bfloat16", "autocast"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_the_gradients_are_those_of_explicit_casts_to_the_bit(path: str, half: str, recompute: bool) -> None:
    model, autocast = model_of(recompute=recompute), half == "autocast"
    model.to(torch.bfloat16 if half == "bfloat16" else torch.float32)
    with fix(model, f"upcast:{path}"):
        loss, found = step(model, autocast)
    found = {name: one.clone() for name, one in found.items()}
    above, _, name = path.rpartition(".")
    inner = model.get_submodule(path)
    model.get_submodule(above)._modules[name] = Cast(inner, torch.float32 if half else torch.float64)
    expected_loss, expected = step(model, autocast)
    expected = {name.replace(f"{path}.inner", path): one for name, one in expected.items()}
    assert torch.equal(loss, expected_loss)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


class HalfInside(nn.Module):
    """Computes in bfloat16 whatever its input is: by casts, by autocast and by types that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.bfloat16).float() + x.bfloat16().float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(y).float()
        result: Tensor = y * torch.full((1,), 1 / 3, dtype=torch.bfloat16)
        return result


def test_an_upcast_module_does_not_cast_down_within() -> None:
    model = nn.Sequential(HalfInside())
    x = torch.randn(5, WIDTH)
    true = copy.deepcopy(model[0].linear).double()(2 * x.double()) / 3
    assert error(model(x), true) > 1e-3
    with fix(model, "upcast:0"):
        assert error(model(x), true) < 1e-6


class Recomputing(nn.Module):
    """Recomputes a part of itself in backward, with dropout and a function that `small` replaces."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda z: F.dropout(F.gelu(self.first(z)), 0.5), x, use_reentrant=self.reentrant)
        result: Tensor = self.second(y)
        return result


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("words", ["upcast:0", "small:0", "cpu:0"])
def test_activations_within_a_fixed_module_are_kept_and_random_numbers_are_the_same(
    words: str, reentrant: bool
) -> None:
    def run(given: str) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(3)
        model, x = nn.Sequential(Recomputing(reentrant)), torch.randn(4, WIDTH, requires_grad=True)
        with fix(model, given):
            y = model(x)
            after = torch.rand(1)
        y.square().sum().backward()
        assert x.grad is not None
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        return torch.cat([y.detach().flatten(), after]), [x.grad, *gradients]

    (plain, gradients), (found, mine) = run(""), run(words)
    assert torch.equal(plain[-1], found[-1])  # the generator is where it was
    assert error(found, plain) < 1e-6
    for one, other in zip(mine, gradients, strict=True):
        assert error(one, other) < 1e-6


class Counter(nn.Module):
    """Multiplies by a number that each call changes. how: in place, by assignment, or outside of buffers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.number = nn.Linear(WIDTH, WIDTH), how, 0
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.how == "in place":
            self.count += 1
            return y * self.count.clone()
        if self.how == "assigned":
            self.count = self.count + 1
            return y * self.count
        if self.how == "data":
            self.count.mul_(0.9).add_(y.detach().mean(), alpha=0.1)
            return torch.tanh(y - self.count.clone())
        self.number += 1
        return y * self.number


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
    "spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "multi-head": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 16, dropout=0.0),
    **{how: (lambda how=how: Counter(how)) for how in ("in place", "assigned", "data", "attribute")},  # type: ignore[misc]
}  # fmt: skip


@pytest.mark.parametrize("words", ["upcast:1.0", "upcast:1 small:1.0"])
@pytest.mark.parametrize("name", MODULES)
def test_state_and_gradients_of_modules_that_change_are_those_without_the_fix(name: str, words: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(MODULES[name]()), nn.Linear(WIDTH, 2))
    plain, xs = copy.deepcopy(model), torch.randn(3, 5, WIDTH)

    def run(one: nn.Module) -> None:
        with torch.no_grad():
            one(xs[0])
        sum(one(x).square().mean() for x in xs[1:]).backward()  # type: ignore[union-attr]

    run(plain)
    with fix(model, words):
        run(model)
    for (path, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-6, msg=path)
    for (path, value), (_, expected) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(value, expected, msg=path)
    assert [getattr(one, "number", 0) for one in model.modules()] == [
        getattr(one, "number", 0) for one in plain.modules()
    ]


def test_an_overwritten_argument_is_an_error() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True))
    with fix(model, "upcast:0"), pytest.raises(NumericsError, match="0 overwrites one of its arguments"):
        model(torch.ones(2))
