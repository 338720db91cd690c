"""Predict peak memory of a training step and an evaluation without the device: the real step on fake tensors.

A fake tensor has a shape, a dtype and a storage size, but no memory. gpt2.training_step.Stepper runs its step on fake
tensors unchanged: model, attention, autocast, loss, autograd, clipping and optimizer.
gpt2.allocation_tracker sums the live bytes. Nothing is extrapolated; no card, driver or CUDA build of torch is
needed.

Assumptions for a GPU:
- fused attention saves the same tensors as the CPU's fused kernel: q, k, v, the output, and one float32 statistic per
  row and head;
- allocations are rounded up to 512 bytes;
- library workspaces are WORKSPACE, and the attention kernel's is `attention_workspace`, for cuDNN too (its size is
  unknown without a card);
- a compiled step allocates like an eager one, but its backward returns all weight gradients at once (see
  `hold_gradients`). torch.compile also fuses elementwise operations, so it needs less than predicted;
- the CUDA context and memory that the allocator reserves beyond its peak are not counted. A plan leaves a margin.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode

from gpt2.allocation_tracker import Allocation, AllocationTracker, PhaseMarks, Timeline
from gpt2.cpu_linear import standard_kernels
from gpt2.loss import CARD_ROWS, chunk_rows, linear_cross_entropy, token_losses
from gpt2.training_step import Phases, Stepper
from gpt2.transformer import ModelParts
from gpt2.validation import evaluating, evaluation_tokens
from runtime.batch_plan import BatchPlan
from runtime.settings import ModelConfig, OptimizerConfig

MICRO_BATCHES = 2  # per step: the second adds to existing gradients, and further ones repeat it


@dataclass(frozen=True)
class StepWorkload:
    """micro: sequences per micro-batch. kind: "cuda", "rocm", "npu" or "cpu": the device to predict for.

    accumulation: micro-batches per step. At most MICRO_BATCHES are run; more change no peak. compile: whether training
    compiles the model.
    """

    model: ModelConfig
    optimizer: OptimizerConfig
    parts: ModelParts | None
    micro: int
    accumulation: int
    kind: str
    dtype: str
    compile: bool = False

    @property
    def batch(self) -> BatchPlan:
        """Return the batch of the step that is run."""
        accumulation = min(self.accumulation, MICRO_BATCHES)
        return BatchPlan(self.micro * accumulation, self.micro, accumulation, 1, self.model.block_size)

    @property
    def evaluation_batch(self) -> int:
        """Return the number of windows of an evaluation batch."""
        return max(1, evaluation_tokens(self.kind) // self.model.block_size)

    @property
    def head_rows(self) -> int:
        """Return the rows of logits that training holds at once."""
        return CARD_ROWS if self.compile and self.kind != "cpu" else chunk_rows(self.kind)

    def prepare(self, device: str, compile: bool = False) -> Stepper:
        """Build model and optimizer, and run a first step, which allocates the optimizer's state.

        The step has one token. With `compile`, it is compiled and has the tokens of the work.
        """
        stepper = Stepper(
            self.model,
            self.optimizer,
            self.batch,
            seed=0,
            device=device,
            dtype=self.dtype,
            compile=compile,
            parts=self.parts,
        )
        sequences, tokens = (self.batch.effective, self.model.block_size) if compile else (1, 1)
        if not compile:
            stepper.loss = functools.partial(linear_cross_entropy, rows=self.head_rows)
        stepper.step(_ids(sequences, tokens, device), 0, 2)
        return stepper

    def run(self, stepper: Stepper, phases: Phases) -> None:
        """Run the step (phases forward, backward, optimizer) and the evaluation."""
        T, model = self.model.block_size, stepper.model
        stepper.step(_ids(self.batch.effective, T, stepper.device), 1, 2, phases)
        ids = _ids(self.evaluation_batch, T, stepper.device)
        with evaluating(model), phases.phase("evaluation"), stepper.autocast():
            rows = chunk_rows(self.kind)
            token_losses(model.hidden(ids[:, :-1]), model.head, ids[:, 1:], model.vocabulary, rows)


def _ids(rows: int, tokens: int, device: str) -> torch.Tensor:
    return torch.zeros((rows, tokens + 1), dtype=torch.int64, device=device)


GRANULARITY = 512  # bytes; kMinBlockSize of the caching allocators of cards
# bytes that the matrix library allocates at its first matrix product: cuBLAS's largest default (Hopper; 8 MiB on older
# devices), and hipBLASLt's
WORKSPACE = {"cuda": 32 * 2**20, "rocm": 76 * 2**20}


@dataclass(frozen=True)
class Prediction:
    """peak_bytes: maximum over training and evaluation. timeline: one optimizer step, then one evaluation batch."""

    peak_bytes: int
    timeline: Timeline


def attention_workspace(operation: Any, arguments: tuple[Any, ...]) -> int:
    """Return the bytes that a GPU's flash attention allocates inside its backward kernel, besides the gradients.

    torch's flash_api.cpp: a float32 accumulator of the query's gradient and one float32 number per row, with rows
    rounded up to 128 and head sizes to 32. Forward needs none.
    """
    if "attention" not in operation.__name__ or "backward" not in operation.__name__:
        return 0
    B, H, T, D = (int(size) for size in arguments[1].shape)
    return B * H * _round_up(T, 128) * (_round_up(D, 32) + 1) * 4


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class _DropoutInKernel(TorchFunctionMode):
    """Disable attention dropout: a GPU's fused kernel draws it inside; the CPU's would allocate a T x T mask."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def cpu_attention_workspace(operation: Any, arguments: tuple[Any, ...]) -> int:
    """Return the bytes that the CPU's fused attention allocates inside a kernel, in float32.

    torch's FlashAttentionKernel.cpp. Forward: a block of scores, two statistics of each of its rows and a block of the
    output, for each thread. Backward: two blocks of scores for each thread, a sum for each row of a block, and a copy
    of the output's gradient unless it is contiguous as (B, T, H, D). Packing of half precision is not counted.
    """
    if "scaled_dot_product_flash_attention_for_cpu" not in operation.__name__:
        return 0
    backward = "backward" in operation.__name__
    query, key = arguments[1:3] if backward else arguments[:2]
    T, D = (int(size) for size in query.shape[2:])
    rows = min(T, 256 if T >= 768 else 64 if T >= 192 else 32)
    columns = min(int(key.shape[2]), 512)
    threads = torch.get_num_threads()
    if not backward:
        return threads * rows * (columns + 2 + D) * 4
    gradient: Tensor = arguments[0]
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    return (threads * 2 * columns + 1) * rows * 4 + copied


def predict(work: StepWorkload) -> Prediction:
    """Predict peak memory of a workload without its device."""
    gpu = work.kind != "cpu"
    tracker = AllocationTracker(
        GRANULARITY if gpu else 1, attention_workspace if gpu else cpu_attention_workspace
    )
    with FakeTensorMode(), contextlib.ExitStack() as stack:
        if gpu:
            stack.enter_context(standard_kernels())
            stack.enter_context(_DropoutInKernel())
        timeline = track(work, tracker, "cpu", hold=work.compile)
    if gpu:
        timeline.blocks.append(Allocation(WORKSPACE.get(work.kind, 0), 0, ""))
    return Prediction(timeline.peak_bytes(), timeline)


def hold_gradients(stepper: Stepper) -> None:
    """Keep the weight gradients of a backward until its end where `.grad` exists, as a compiled backward does.

    It is one autograd function, so all gradients exist before the first is added to its `.grad`. Without `.grad` they
    become it. The head is outside of the compiled model.
    """
    held: list[Tensor] = []

    def keep(parameter: Tensor) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if parameter.grad is not None:
                if not held:
                    Variable._execution_engine.queue_callback(held.clear)  # type: ignore[attr-defined]
                held.append(gradient)

        return hook

    for parameter in stepper.parameters:
        if parameter is not stepper.model.head:
            parameter.register_hook(keep(parameter))


def track(work: StepWorkload, tracker: AllocationTracker, device: str, hold: bool = False) -> Timeline:
    """Run a workload on a device under the tracker, with real tensors or in a FakeTensorMode.

    hold: see `hold_gradients`.
    """
    with tracker:
        stepper = work.prepare(device)
        if hold:
            hold_gradients(stepper)
        work.run(stepper, PhaseMarks(tracker, stepper.model, stepper.optimizer))
    return tracker.timeline()
