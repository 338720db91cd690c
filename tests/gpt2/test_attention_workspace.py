"""The CPU's attention kernel: the blocks that it holds for each thread, against the bytes that torch allocates."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.allocation_tracker import AllocationTracker
from gpt2.measured_memory import AllocatorListener
from gpt2.predicted_memory import cpu_attention_workspace

HEADS, SIZE = 2, 64


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def inputs(length: int) -> list[Tensor]:
    return [torch.ones(1, HEADS, length, SIZE, requires_grad=True) for _ in range(3)]


def attend(qkv: list[Tensor], gradient: str) -> None:
    out = F.scaled_dot_product_attention(*qkv, is_causal=True)
    if gradient == "of each head":  # as in the model: (B, T, H, D) in memory
        torch.autograd.grad(out, qkv, out.detach())
    elif gradient == "copied":
        torch.autograd.grad(out, qkv, torch.ones_like(out, memory_format=torch.contiguous_format))


def tracked(length: int, gradient: str) -> int:
    tracker = AllocationTracker(workspace=cpu_attention_workspace)
    with tracker:
        attend(inputs(length), gradient)
    return max(tracker.timeline().curve())


def allocated(length: int, gradient: str) -> int:
    qkv = inputs(length)
    with AllocatorListener(sum(value.nbytes for value in qkv)) as listener, listener.phase("kernel"):
        attend(qkv, gradient)
    return listener.by_phase["kernel"]


@pytest.mark.parametrize("gradient", ["", "of each head", "copied"], ids=["forward", "backward", "copied"])
@pytest.mark.parametrize("length", [20, 200, 800])
def test_a_kernel_s_blocks_are_counted_for_each_thread(length: int, gradient: str, threads: int) -> None:
    assert tracked(length, gradient) == allocated(length, gradient)
