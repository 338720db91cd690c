"""Bisect any step: modules, code between them, updates and losses of another run; and the commands of a factory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from referee.numerics import NumericsError
from referee.numerics.replayed_step import ReplayedStep
from referee.numerics.search.bisect_replays import Bisection, play


class Layer(nn.Module):
    """fault: of its code, after its linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fault: Callable[[Tensor], Tensor] = lambda y: y

    def forward(self, x: Tensor) -> Tensor:
        return self.fault(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(8, 8), nn.ModuleList(Layer() for _ in range(3))
        self.head, self.fault = nn.Linear(8, 8), lambda y: y

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x).float()
        y: Tensor = self.fault(self.head(x)).float()
        return y


def overflows(y: Tensor) -> Tensor:
    return (y.half() * 600).half() * 600


def cancels(y: Tensor) -> Tensor:
    return y * (1 + 400 * (0.25 - (torch.full((1,), 2048.25).half() - 2048).to(y.dtype)))


def replay_of(change: Callable[[Net], None], steps: int = 1, **options: Any) -> ReplayedStep:
    torch.manual_seed(0)
    net = Net()
    change(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    x = torch.randn(16, 8)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return ReplayedStep(step, [net, optimizer], steps=steps, **options)


class HalfLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return overflows(super().forward(x))


def part_overflows(name: str) -> Callable[[Net], None]:
    def change(net: Net) -> None:
        module: Any = net.get_submodule(name)
        if isinstance(module, nn.Linear):
            module.__class__ = HalfLinear
        else:
            module.fault = overflows

    return change


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("head", "upcast:head"),
        ("blocks.1.linear", "upcast:blocks.1.linear"),
        ("blocks.1", "upcast:blocks.1"),  # its own code, in none of its modules
        ("", "upcast:."),  # code of the model between its layers
    ],
)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_smallest_part_that_overflows_is_named(part: str, expected: str, steps: int) -> None:
    replay = replay_of(part_overflows(part), steps)
    before = {name: value.clone() for name, value in replay.model.state_dict().items()}
    assert Bisection(replay).search() == (expected,)
    assert all(torch.equal(value, before[name]) for name, value in replay.model.state_dict().items())


def test_a_spike_and_a_difference_from_a_right_run_are_named() -> None:
    golden, _ = play(replay_of(lambda net: None, 3))

    def change(net: Net) -> None:
        net.blocks[2].fault = cancels

    before = [golden.losses[1] + 0.001 * (k % 2) for k in range(20)]
    assert Bisection(replay_of(change, 3, before=before), "spike").search() == ("upcast:blocks.2",)
    assert Bisection(replay_of(change, 3, golden=golden), "differs").search() == ("upcast:blocks.2",)
    with pytest.raises(NumericsError, match="does not show the symptom differs"):
        Bisection(replay_of(lambda net: None, 3, golden=golden), "differs").search()


def test_nothing_is_found_where_no_fix_helps_and_a_fix_that_fails_is_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(net: Net) -> None:
        net.fault = lambda y: y * math.inf

    assert Bisection(replay_of(change)).search() == ()

    def fail(*args: Any) -> Any:
        raise RuntimeError("No available kernel.\nAborting execution.")

    monkeypatch.setattr("referee.numerics.search.fixed_modules.FixedModule.run", fail)
    bisection = Bisection(replay_of(part_overflows("head")))
    assert bisection.search() == ()
    assert {*bisection.tried.values()} == {"symptom", "RuntimeError: No available kernel."}


@pytest.mark.parametrize(
    ("symptom", "change", "message"),
    [
        ("slow", lambda net: None, "symptom slow is unknown"),
        ("differs", lambda net: None, "there are no right losses"),
        ("nan", lambda net: None, "does not show the symptom nan"),
        ("nan", lambda net: net.blocks.append(nn.Linear(3, 3)), "the step fails: RuntimeError"),
    ],
)
def test_what_cannot_be_searched_is_one_line(symptom: str, change: Any, message: str) -> None:
    with pytest.raises(NumericsError, match=f"{message}.*fix: "):
        Bisection(replay_of(change), symptom).search()
