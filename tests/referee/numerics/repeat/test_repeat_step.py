"""A step is repeated under several conditions; the cause of a difference is named, and none without a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from referee.numerics import repeat_step
from referee.numerics.repeat import repeat_evidence as causes
from referee.numerics.repeat.conditions import run_once
from referee.numerics.repeat.observe import OperationObserver
from referee.numerics.repeat.repeat_evidence import RepeatCause, Repetition
from referee.numerics.replayed_step import ReplayedStep

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    """A layer whose result passes a function."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.linear(x))


def training(change: Callable[[Tensor], Tensor] = F.gelu) -> tuple[Callable[[], Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Layer(change), nn.LayerNorm(16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step() -> Tensor:
        loss: Tensor = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, {"model": model, "optimizer": optimizer}


def repeated(change: Callable[[Tensor], Tensor] = F.gelu, times: int = 3, **options: Any) -> Repetition:
    step, state = training(change)
    return repeat_step(step, state, times=times, **({"threads": 2} | options))


def first(found: Repetition) -> RepeatCause:
    assert found.causes, found.rows()
    return found.causes[0]


def test_a_deterministic_step_is_reproducible_and_its_state_is_restored() -> None:
    step, state = training()
    before = {name: value.clone() for name, value in state["model"].state_dict().items()}
    found = repeat_step(step, state, times=3, threads=2)
    assert not found.is_fault, found.rows()
    assert all(cause.harmless for cause in found.causes)
    assert all(condition.distinct == 1 for condition in found.conditions.values())
    assert all(torch.equal(value, before[name]) for name, value in state["model"].state_dict().items())
    assert state["optimizer"].state_dict()["state"] == {}


def test_observation_changes_no_bit_of_the_step() -> None:
    step, state = training()
    prepared = ReplayedStep(step, state)
    observed, plain = (
        run_once(prepared, observer) for observer in (OperationObserver(prepared.places), None)
    )
    assert observed.results == plain.results
    assert len(plain.results) == 1 + 6 + 18  # loss, parameters, and Adam's step and moments


class Unordered(torch.autograd.Function):
    """Add rows in an order that changes from call to call, below the operations that are observed."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return index_sum(x)

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> Tensor:
        return received[0].expand(8, 16)


@torch.library.custom_op("numerics_test::index_sum_unordered", mutates_args=())
def index_sum(x: Tensor) -> Tensor:
    """Sum eight rows as one kernel with atomic additions does."""
    Unordered.calls += 1
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(Unordered.calls)).tolist()
    total = torch.zeros_like(x[0])
    for row in order:
        total += x[row] * 1.1
    return total


LATE: list[Callable[[], object]] = []


@torch.library.custom_op("numerics_test::late_fill", mutates_args=("x",))
def late_fill(x: Tensor) -> None:
    """Write later than it is called, as a stream of a device does."""
    memory = x.numpy()
    LATE.append(lambda: memory.fill(0.25))


def finish_writes() -> None:
    while LATE:
        LATE.pop(0)()


def test_a_fault_that_vanishes_under_synchronisation_is_an_asynchronous_memory_fault() -> None:
    def change(x: Tensor) -> Tensor:
        buffer = torch.zeros(8, 16)
        late_fill(buffer)
        early = buffer * 1.0  # nothing waits for the write
        finish_writes()
        return x + early + buffer * 0.5

    found = first(repeated(change, synchronise=finish_writes))
    assert found.name == causes.ASYNCHRONOUS
    assert found.operation
    assert found.operation.name == "aten.mul.Tensor"
    unsynchronised = first(repeated(change))
    assert unsynchronised.name == causes.UNOBSERVED_WRITE


@torch.library.custom_op("numerics_test::faulty_copy", mutates_args=())
def faulty_copy(x: Tensor) -> Tensor:
    faulty_copy.calls = getattr(faulty_copy, "calls", 0) + 1  # type: ignore[attr-defined]
    y = x.clone()
    if faulty_copy.calls % 2:  # type: ignore[attr-defined]
        y.view(-1)[32:64] = float("nan")
    return y


def test_a_pattern_larger_than_rounding_in_an_operation_is_named_as_memory_or_hardware() -> None:
    def change(x: Tensor) -> Tensor:
        y: Tensor = faulty_copy(x.detach())
        return x + y

    found = first(repeated(change, times=4))
    assert found.name == causes.IN_OPERATION
    assert found.pattern
    assert "32 of 128 elements, 32 to 63" in found.pattern.text
    assert found.alternative


def test_an_operation_that_differs_with_several_threads_alone_and_by_rounding_is_harmless() -> None:
    @torch.library.custom_op("numerics_test::thread_sum", mutates_args=())
    def thread_sum(x: Tensor) -> Tensor:
        total = torch.zeros_like(x[0])
        for row in x if torch.get_num_threads() == 1 else x.flip(0):
            total += row
        return total

    def change(x: Tensor) -> Tensor:
        return x + thread_sum(x.detach() * 1.1)

    found = repeated(change)
    assert not found.is_fault, found.rows()
    named = first(found)
    assert (named.name, named.harmless) == (causes.THREADS, True)
    assert named.operation
    assert "thread_sum" in named.operation.name


def test_state_that_is_not_restored_is_named() -> None:
    hidden = torch.zeros(16)

    def change(x: Tensor) -> Tensor:
        hidden.add_(1.0)
        return x + hidden

    found = first(repeated(change))
    assert found.name == causes.STATE
    assert found.difference.endswith("written by before the step")


def test_another_path_of_python_code_is_named() -> None:
    calls: list[int] = []

    def change(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin() if len(calls) % 2 else x.cos()

    assert first(repeated(change)).name == causes.PATH


def test_a_difference_that_only_unobserved_repetitions_show_is_named_as_timing() -> None:
    calls: list[int] = []

    def change(x: Tensor) -> Tensor:
        calls.append(1)
        observed = torch.utils._python_dispatch._get_current_dispatch_mode() is not None
        return x * (1.0 if observed else 1.0 + len(calls))

    found = first(repeated(change, synchronise=None))
    assert found.name == causes.TIMING


@torch.library.custom_op("numerics_test::with_workspace", mutates_args=())
def with_workspace(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a result and a workspace whose content is arbitrary."""
    Unordered.calls += 1
    return x * 2, torch.full((4,), float(Unordered.calls))


def test_an_output_that_no_result_depends_on_is_no_fault_and_hides_none() -> None:
    def change(x: Tensor) -> Tensor:
        result: Tensor = with_workspace(x.detach())[0]
        return x + result

    found = repeated(change)
    assert not found.is_fault
    named = first(repeated(lambda x: Unordered.apply(change(x)), times=6))  # type: ignore[no-any-return, no-untyped-call]
    assert named.operation
    assert "index_sum_unordered" in named.operation.name
