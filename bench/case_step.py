"""Build and time the optimizer step of one case, inside its worker.

A case is "plain" (bench.reference_gpt), a variant, RALEARN:mix, or RALEARN:mix:k with the gate's gradient at every
k-th step.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import torch

from bench.cases import BLOCK_STEPS, PLAIN, Shape, Sizes
from bench.reference_gpt import PlainStep
from gpt2.config.batch import BatchPlan, plan_batch
from gpt2.config.config import ANY_TARGET, PADDED_VOCABULARY, VOCABULARY, ModelConfig, OptimizerConfig
from gpt2.hardware import attention_kernels
from gpt2.hardware.resolve import ResolvedTarget
from gpt2.train.peak_memory import PeakMeter
from gpt2.train.step import Stepper, build_model
from gpt2.train.trainer import device_synchroniser
from ra.settings import AlternationSettings
from ra.variants import variant

WARM_UP_STEPS = 3  # compile and allocate
Step = Callable[[int], Any]  # takes an iteration


def serve(shape: dict[str, Any], case: str, micro: int) -> Iterator[dict[str, Any]]:
    """Warm up, then time steps for each line of seconds on stdin. Yield the measurement of each line.

    shape: the fields of a Shape.
    """
    sizes = Shape(**shape)
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(sizes))
    synchronise = device_synchroniser(resolved.device) if resolved.device != "cpu" else None
    meter = PeakMeter(resolved.device)
    step, flops, nanogpt = case_step(sizes, case, micro, resolved)
    tokens = batch_plan(sizes, micro, sizes.effective).tokens
    with kernels(case, resolved):
        for seconds, peak in timed_requests(step, case, sys.stdin, meter, synchronise):
            yield {
                "step_seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "peak_bytes": peak,
                "flops_per_token": flops,
                "nanogpt_flops_per_token": nanogpt,
            }


def timed_requests(
    step: Step,
    case: str,
    lines: Iterable[str],
    meter: PeakMeter,
    synchronise: Callable[[], None] | None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[float, int]]:
    """Yield, for each line of seconds, the median seconds of a step and the peak bytes of the steps timed so far.

    Neither includes the warm-up with its compilation. synchronise: waits for a GPU; None on a CPU.
    """
    for iteration in range(WARM_UP_STEPS):
        step(iteration)
    if synchronise:
        synchronise()
    for line in lines:
        samples: list[float] = []
        with meter.phase("steps"):
            began = clock()
            while not samples or clock() - began < float(line):
                if synchronise:
                    samples.append(block_mean(step, case, synchronise, clock))
                else:
                    samples.append(weighted_mean(step, case, clock))
        # without a phase if the system cannot reset its high-water mark
        yield median(samples), meter.by_phase.get("steps", meter.peaks()["allocated"])


def block_mean(step: Step, case: str, synchronise: Callable[[], None], clock: Callable[[], float]) -> float:
    """Return the mean seconds of a block of consecutive steps on a GPU, synchronised at its end only.

    A training loop launches a step while the previous one runs. Synchronising after each step would add the launch
    time. If a gate moves at every k-th step, the block's length is a multiple of k: its mean is that of training.
    """
    _, every = mix_of(case)
    steps = -(-BLOCK_STEPS // every) * every
    before = clock()
    for iteration in range(steps):
        step(iteration)
    synchronise()
    return (clock() - before) / steps


def weighted_mean(step: Step, case: str, clock: Callable[[], float]) -> float:
    """Return the mean seconds of a step on a CPU: time one step of each kind, weighted by its share of all steps."""
    mean = 0.0
    for iteration, share in enumerate(step_shares(case)):
        before = clock()
        step(iteration)
        mean += share * (clock() - before)
    return mean


def step_shares(case: str) -> tuple[float, ...]:
    """Return the share of each kind of step: every k-th step may cost more than the others."""
    _, every = mix_of(case)
    return (1.0,) if every == 1 else (1 / every, 1 - 1 / every)


def kernels(case: str, resolved: ResolvedTarget) -> AbstractContextManager[Any]:
    """Select the kernels of a case while it compiles and runs.

    Our cases use the target's fused attention, as in training. The plain case uses the kernel that torch prefers.
    """
    return contextlib.nullcontext() if case == PLAIN else attention_kernels.attention_context(resolved)


def batch_plan(sizes: Sizes, micro: int, effective: int = 0) -> BatchPlan:
    """Plan an optimizer step of `effective` sequences (0: one micro-batch). BatchError if micro does not divide it."""
    return plan_batch(effective or micro, micro, 1, sizes.block_size)


def random_batch(sizes: Sizes, sequences: int, device: str) -> torch.Tensor:
    """Draw token ids (sequences, T+1) int64, the same at every call."""
    size_ET = (sequences, sizes.block_size + 1)
    return torch.randint(VOCABULARY, size_ET, generator=torch.Generator().manual_seed(0)).to(device)


def case_step(shape: Shape, case: str, micro: int, resolved: ResolvedTarget) -> tuple[Step, float, float]:
    """Build the optimizer step of a case on a fixed random batch.

    Returns it with its FLOPs a token by this project's formula and by nanoGPT's.
    """
    ids_ET = random_batch(shape, shape.effective or micro, resolved.device)
    if case == PLAIN:
        plain = PlainStep(shape, PADDED_VOCABULARY, resolved.device, shape.accumulation(micro))
        flops = build_model(*model_and_attention(shape, "B")).flops_per_token()
        return lambda iteration: plain(ids_ET), flops, nanogpt_flops(plain.model, shape)
    stepper = make_stepper(shape, case, micro, resolved, shape.effective)
    flops, nanogpt = stepper.model.flops_per_token(), nanogpt_flops(stepper.model, shape)
    return lambda iteration: stepper.step(ids_ET, iteration, 10**9), flops, nanogpt


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
    model, attention = model_and_attention(sizes, case)
    return Stepper(
        model,
        optimizer_config(learning_rate),
        batch_plan(sizes, micro, effective),
        seed=seed,
        device=resolved.device,
        dtype=resolved.dtype,
        compile=resolved.device != "cpu",
        attention=attention,
    )


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


def model_and_attention(sizes: Sizes, case: str) -> tuple[ModelConfig, Any]:
    """Return the arguments of gpt2.train.step.build_model for a case."""
    mix, every = mix_of(case)
    model = model_config(sizes)
    settings = AlternationSettings(mix or "output", 0.5, 1.0, gate_every=every)
    return model, variant(case.partition(":")[0], model, settings).attention


def mix_of(case: str) -> tuple[str, int]:
    """Parse RALEARN:mix:k into mix ("" if absent) and k (1 if absent)."""
    _, mix, every = [*case.split(":"), "", ""][:3]
    return mix, int(every or 1)


def nanogpt_flops(model: torch.nn.Module, sizes: Sizes) -> float:
    """Count FLOPs a token as nanoGPT does: 6 N + 12 L C T, N without the position embedding."""
    parameters = sum(p.numel() for p in model.parameters()) - sizes.block_size * sizes.width
    return float(6 * parameters + 12 * sizes.layers * sizes.width * sizes.block_size)
