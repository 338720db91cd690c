"""Recomputation in backward: bitwise equal numbers, no saved activation, no repeated matrix product."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2 import cpu_linear
from gpt2.cpu_linear import checkpoint_through_linear

ROWS, WIDE, OUT = 6, 8, 4


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu_linear, "MOST_SAVED", 0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def outcome(work: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
    """y and the gradients of input, weight and bias."""
    draw = torch.Generator().manual_seed(1)
    sizes = ((ROWS, WIDE), (OUT, WIDE), (OUT,))
    x, weight, bias = (torch.randn(size, generator=draw).requires_grad_() for size in sizes)
    y = work(x, weight, bias)
    y.square().sum().backward()
    assert all(tensor.grad is not None for tensor in (x, weight, bias))
    return [y.detach(), *(tensor.grad for tensor in (x, weight, bias) if tensor.grad is not None)]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_values_and_gradients_are_bitwise_those_without_recomputation(dropout: float) -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(F.gelu(x), dropout)

    torch.manual_seed(2)
    usual = outcome(lambda x, weight, bias: F.linear(function(x), weight, bias))
    torch.manual_seed(2)
    result = outcome(
        lambda x, weight, bias: checkpoint_through_linear(
            function, lambda hidden: F.linear(hidden, weight, bias), x, random=dropout > 0
        )
    )
    for one, other in zip(usual, result, strict=True):
        assert torch.equal(one, other)


def test_the_activation_is_not_saved_and_the_matrix_product_runs_once() -> None:
    created: list[weakref.ref[Tensor]] = []

    def function(x: Tensor) -> Tensor:
        y = F.gelu(x)
        created.append(weakref.ref(y))
        return y

    alive: list[bool] = []

    def work(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = checkpoint_through_linear(function, lambda hidden: F.linear(hidden, weight, bias), x)
        alive.append(created[0]() is not None)
        return y

    with Counted() as counted:
        outcome(work)
    assert alive == [False]
    assert counted.calls["addmm"] == 1
    assert counted.calls["gelu"] == 2


def test_a_layer_under_autocast_runs_once() -> None:
    """As in the model: three dimensions, an nn.Linear, a bfloat16 cast of the weight that is recomputed."""
    layer, x = torch.nn.Linear(WIDE, OUT), torch.randn(2, ROWS, WIDE, requires_grad=True)
    with Counted() as counted:
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint_through_linear(F.gelu, layer, x)
        assert y.dtype == torch.bfloat16
        y.sum().backward()
    assert counted.calls["addmm"] == 1
    assert counted.calls["gelu"] == 2
