"""Peak memory of a training step and of an evaluation, before there is a card: the real step on fake tensors.

A fake tensor has a shape, a dtype and a storage of a size, and no memory. gpt2.train.step.Stepper makes its step with
them, unchanged: model, attention, autocast, loss, autograd, clipping and optimizer;
gpt2.memory.allocation_tracker adds up what is
alive. Nothing is extrapolated and no card, driver or CUDA build of torch is needed.

What is assumed of a GPU: fused attention keeps what the CPU's fused kernel keeps (q, k, v, the output, and float32
statistics of one number a row and head); allocations are rounded up to 512 bytes; the libraries' workspaces and the
attention kernel's own are those of WORKSPACE and `attention_workspace`. The step is not compiled: torch.compile
fuses elementwise operations and keeps fewer tensors, so that a compiled step needs less. The CUDA context and
what the allocator reserves beyond its peak are not in the figure: a plan leaves a margin for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from gpt2.memory.allocation_tracker import Block, PhaseMarks, Timeline, Tracker
from gpt2.memory.workload import Work
from gpt2.model import cpu_linear
from gpt2.model import loss as loss_module

GRANULARITY = {"cpu": 1, "cuda": 512, "rocm": 512}  # bytes; CUDACachingAllocator's kMinBlockSize
# Bytes that the matrix library keeps from its first product on: cuBLAS's largest default (Hopper; 8 MiB before), and
# hipBLASLt's.
WORKSPACE = {"cpu": 0, "cuda": 32 * 2**20, "rocm": 76 * 2**20}


@dataclass(frozen=True)
class Prediction:
    """peak_bytes: of training and evaluation. timeline: one optimizer step in full, then an evaluation batch."""

    peak_bytes: int
    timeline: Timeline


def attention_workspace(operation: Any, arguments: tuple[Any, ...]) -> int:
    """Bytes that a GPU's flash attention takes inside its backward kernel, besides the gradients.

    torch's flash_api.cpp: the query's gradient summed in float32, and a float32 number a row, with rows rounded up to
    128 and head sizes to 32. Its forward takes none.
    """
    if "attention" not in operation.__name__ or "backward" not in operation.__name__:
        return 0
    B, H, T, D = arguments[1].shape
    return B * H * _up(T, 128) * (_up(D, 32) + 1) * 4


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@contextlib.contextmanager
def _as_on(kind: str) -> Iterator[None]:
    """The loss in chunks as long, the layers as they are there, and attention's dropout where it is, on that kind."""
    if kind == "cpu":
        yield
        return
    rows, devices = loss_module.CHUNK_ROWS, cpu_linear.CPU_KERNEL_DEVICES
    loss_module.CHUNK_ROWS, cpu_linear.CPU_KERNEL_DEVICES = {"cpu": rows["cuda"]}, set()
    try:
        with _DropoutInKernel():
            yield
    finally:
        loss_module.CHUNK_ROWS, cpu_linear.CPU_KERNEL_DEVICES = rows, devices


class _DropoutInKernel(TorchFunctionMode):
    """A GPU's fused attention draws its dropout inside, where the CPU's would write out a T x T mask."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def predict(work: Work) -> Prediction:
    """Predicted memory of the work, on whatever machine this is."""
    gpu = work.kind != "cpu"
    tracker = Tracker(GRANULARITY[work.kind], attention_workspace if gpu else None)
    with FakeTensorMode(), _as_on(work.kind):
        timeline = tracked(work, tracker, "cpu")
    if gpu:
        timeline.blocks.append(Block(WORKSPACE[work.kind], 0, "", "matrix library"))
    return Prediction(timeline.peak_bytes(), timeline)


def tracked(work: Work, tracker: Tracker, device: str) -> Timeline:
    """What the tracker sees of the work on a device, with real tensors or in a FakeTensorMode."""
    with tracker:
        stepper = work.prepare(device)
        with tracker.watching(stepper.model):
            work.run(stepper, PhaseMarks(tracker, stepper.model, stepper.optimizer))
    return tracker.timeline()
