"""Build and time the optimizer step of one case, inside its worker.

A case is "plain" (bench.reference_gpt), an arm (ra.arms), RALEARN:mix, or RALEARN:mix:k with the gate's gradient at
every k-th step. It may end in options of the step (bench.case_step).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.cases import BLOCK_STEPS, PLAIN, Shape, Sizes, arm_of
from bench.reference_gpt import PlainStep
from gpt2 import loss
from gpt2.clocks import device_synchroniser
from gpt2.measured_memory import PeakMeter
from gpt2.training_step import Stepper, build_model
from gpt2.transformer import ModelParts
from ra.alternation import AlternationSettings
from ra.variants import variant
from runtime import attention_kernels
from runtime.errors import UserError
from runtime.resolve import ResolvedTarget
from runtime.run_plan import plan_batch
from runtime.settings import ANY_TARGET, GPT2, ModelConfig, OptimizerConfig


def apply_options(stepper: Stepper, case: str) -> None:
    """Apply the options of a case before its first step. UserError for an unknown option."""
    for name in (suffix for suffix in case.split("+")[1:] if "=" not in suffix):  # the others are modifiers
        if name not in OPTIONS:
            raise UserError(f"{case}: unknown option {name!r}; options: {', '.join(OPTIONS)}")
        OPTIONS[name](stepper)


def head_chunk(rows: int, stepper: Stepper) -> None:
    """Hold logits of so many rows at once: larger products, more memory."""
    loss.CHUNK_ROWS["cpu" if stepper.device == "cpu" else "card"] = rows


def float32_product(stepper: Stepper) -> None:
    """Write the head's weight gradient as float32 from the product itself, without a bfloat16 copy."""

    def add_product(total_VC: Tensor, grad_NV: Tensor, x_NC: Tensor, first: bool) -> None:
        part_VC = torch.mm(grad_NV.T, x_NC, out_dtype=total_VC.dtype)
        total_VC.copy_(part_VC) if first else total_VC.add_(part_VC)

    loss._add_product = add_product


def gather_first(stepper: Stepper) -> None:
    """Read the target logits before the compiled part of the loss, which then has no indirect access.

    So softmax and gradient can be one kernel that overwrites the logits.
    """
    compiled = torch.compile(softmax_gradient)

    def chunk(logits_NV: Tensor, targets_N: Tensor, count: Tensor, vocabulary: int) -> Tensor:
        target_logit_N1 = logits_NV.gather(1, targets_N.clamp(min=0)[:, None])
        log_sum_N1 = compiled(logits_NV, targets_N, count, vocabulary)
        return ((log_sum_N1 - target_logit_N1)[:, 0] * (targets_N != loss.IGNORED)).sum()

    stepper.loss = functools.partial(loss.linear_cross_entropy, chunk=chunk)


def softmax_gradient(logits_NV: Tensor, targets_N: Tensor, count: Tensor, vocabulary: int) -> Tensor:
    """Overwrite logits as loss.chunk_loss does. Return each row's log-sum-exp (N, 1), float32."""
    column_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    float_NV = logits_NV.float().masked_fill(column_V >= vocabulary, float("-inf"))
    log_sum_N1 = float_NV.logsumexp(-1, keepdim=True)
    onehot_NV = column_V == targets_N[:, None]
    weight_N1 = (targets_N != loss.IGNORED)[:, None] / count
    logits_NV.copy_(((float_NV - log_sum_N1).exp() - onehot_NV.float()) * weight_N1)
    return log_sum_N1


def bfloat16_residual(stepper: Stepper) -> None:
    """Store the residual stream and the final norm's output in bfloat16. This changes the loss by rounding."""
    model = stepper.model
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: (inputs[0].bfloat16(),))
    model.norm.register_forward_hook(lambda norm, inputs, output: output.bfloat16())


OPTIONS: dict[str, Callable[[Stepper], None]] = {
    "chunk16k": functools.partial(head_chunk, 16_384),
    "chunk32k": functools.partial(head_chunk, 32_768),
    "f32grad": float32_product,
    "gather": gather_first,
    "bf16": bfloat16_residual,
}


WARM_UP_STEPS = 3  # compile and allocate
MIDDLE = (
    720_720_000  # steps are timed in the middle of training, where +AQN= draws noise; a multiple of 1 .. 16
)
SMALLEST = Shape("smallest", 1, 1, 8, 2)
Step = Callable[[int], Any]  # takes an iteration


@dataclass(frozen=True)
class PreparedCase:
    """A case after its warm-up. meter: created before its model. FLOPs: of one token."""

    step: Step
    resolved: ResolvedTarget
    meter: PeakMeter
    flops_per_token: float
    nanogpt_flops_per_token: float


@functools.cache
def prepare_case(shape: Shape, case: str, micro: int) -> PreparedCase:
    """Build a case and run its warm-up steps, once in a process."""
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
    with kernels(case, resolved):
        if resolved.device == "cpu":
            load_libraries, _, _ = case_step(SMALLEST, case, 1, resolved)
            load_libraries(0)  # they are no memory of the case
        meter = PeakMeter(resolved.device)
        step, flops, nanogpt_flops = case_step(shape, case, micro, resolved)
        for iteration in range(WARM_UP_STEPS):
            step(iteration)
    device_synchroniser(resolved.device)()
    return PreparedCase(step, resolved, meter, flops, nanogpt_flops)


def time_case(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
    """Time steps of a case for so many seconds, at least one step. The first call in a process warms the case up.

    Returns the fields of bench.runner.CaseTiming except case, micro and round.
    """
    prepared = prepare_case(shape, case, micro)
    device, meter = prepared.resolved.device, prepared.meter
    samples: list[float] = []
    with kernels(case, prepared.resolved), meter.phase("steps"):
        began = time.perf_counter()
        while not samples or time.perf_counter() - began < seconds:
            samples.append(timed_step(prepared.step, case, device_synchroniser(device), device != "cpu"))
    step_seconds = median(samples)
    return {
        "step_seconds": step_seconds,
        "tokens_per_second": (shape.effective or micro) * shape.block_size / step_seconds,
        # of all steps if the system cannot reset its high-water mark
        "peak_bytes": meter.by_phase.get("steps", meter.peaks()["allocated"]),
        "flops_per_token": prepared.flops_per_token,
        "nanogpt_flops_per_token": prepared.nanogpt_flops_per_token,
    }


def timed_step(
    step: Step,
    case: str,
    synchronise: Callable[[], None],
    on_gpu: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the mean seconds of a step, as in training.

    On a GPU a block of steps is timed, with one synchronisation at its end: a training loop launches a step while the
    previous one runs, so a synchronisation after each step would add the launch time. A gate that moves at every k-th
    step makes that step cost more: a block has a multiple of k steps, and on a CPU each kind of step is timed once and
    weighted by its share.
    """
    _, every = mix_of(case)
    if not on_gpu:
        mean = 0.0
        for iteration, share in enumerate((1.0,) if every == 1 else (1 / every, 1 - 1 / every)):
            before = clock()
            step(iteration)
            mean += share * (clock() - before)
        return mean
    steps = -(-BLOCK_STEPS // every) * every
    before = clock()
    for iteration in range(steps):
        step(iteration)
    synchronise()
    return (clock() - before) / steps


def kernels(case: str, resolved: ResolvedTarget) -> AbstractContextManager[Any]:
    """Select the kernels of a case while it compiles and runs.

    Our cases use the target's fused attention, as in training. The plain case uses the kernel that torch prefers.
    """
    return contextlib.nullcontext() if case == PLAIN else attention_kernels.attention_context(resolved)


def random_batch(sizes: Sizes, sequences: int, device: str) -> torch.Tensor:
    """Draw token ids (sequences, T+1) int64, the same at every call."""
    size_ET = (sequences, sizes.block_size + 1)
    return torch.randint(GPT2.size, size_ET, generator=torch.Generator().manual_seed(0)).to(device)


def case_step(shape: Shape, case: str, micro: int, resolved: ResolvedTarget) -> tuple[Step, float, float]:
    """Build the optimizer step of a case on a fixed random batch.

    Returns it with its FLOPs a token by this project's formula and by nanoGPT's.
    """
    ids_ET = random_batch(shape, shape.effective or micro, resolved.device)
    if case == PLAIN:
        plain = PlainStep(shape, GPT2.padded, resolved.device, shape.accumulation(micro))
        flops = build_model(*model_and_parts(shape, "B")).flops_per_token()
        return lambda iteration: plain(ids_ET), flops, nanogpt_flops(plain.model, shape)
    stepper = make_stepper(shape, case, micro, resolved, shape.effective)
    flops, nanogpt = stepper.model.flops_per_token(), nanogpt_flops(stepper.model, shape)
    return lambda iteration: stepper.step(ids_ET, MIDDLE + iteration, 2 * MIDDLE), flops, nanogpt


def make_stepper(
    sizes: Sizes,
    case: str,
    micro: int,
    resolved: ResolvedTarget,
    effective: int = 0,
    seed: int = 0,
    learning_rate: float = 1e-4,
) -> Stepper:
    """Build the trainer's Stepper of a case, compiled on a GPU as in training."""
    model, parts = model_and_parts(sizes, case)
    stepper = Stepper(
        model,
        optimizer_config(learning_rate),
        plan_batch(effective or micro, micro, 1, sizes.block_size),
        seed=seed,
        device=resolved.device,
        dtype=resolved.dtype,
        compile=resolved.device != "cpu",
        parts=parts,
    )
    apply_options(stepper, case)
    return stepper


def optimizer_config(learning_rate: float = 1e-4) -> OptimizerConfig:
    """Return the optimizer of the plain case: constant rate, weight decay 0.1, gradients clipped at norm 1."""
    return OptimizerConfig(
        learning_rate=learning_rate,
        min_learning_rate_ratio=1.0,
        warmup_fraction=0.0,
        weight_decay=0.1,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        grad_clip=1.0,
    )


def model_config(sizes: Sizes) -> ModelConfig:
    return ModelConfig(sizes.name, sizes.layers, sizes.heads, sizes.width, sizes.block_size, 0.0)


def model_and_parts(sizes: Sizes, case: str) -> tuple[ModelConfig, ModelParts]:
    """Return the arguments of gpt2.training_step.build_model for a case."""
    mix, every = mix_of(case)
    settings = AlternationSettings(mix or "output", 0.5, 1.0, gate_every=every)
    chosen = variant(arm_of(case), model_config(sizes), settings)
    return chosen.model, chosen.parts


def mix_of(case: str) -> tuple[str, int]:
    """Parse RALEARN:mix:k into mix ("" if absent) and k (1 if absent)."""
    attention, mix, every = [*case.partition("+")[0].split(":"), "", ""][:3]
    return ("", 1) if attention == "RA" else (mix, int(every or 1))


def nanogpt_flops(model: torch.nn.Module, sizes: Sizes) -> float:
    """Count FLOPs a token as nanoGPT does: 6 N + 12 L C T, N without the position embedding."""
    parameters = sum(p.numel() for p in model.parameters()) - sizes.block_size * sizes.width
    return float(6 * parameters + 12 * sizes.layers * sizes.width * sizes.block_size)
