"""Build and time the optimizer step of one case, inside its worker. A case is "plain" or an arm (bench.cases)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from bench.cases import BASELINE, BLOCK_STEPS, PLAIN, Shape, Sizes
from bench.reference_gpt import PlainStep
from gpt2.clocks import device_synchroniser
from gpt2.measured_memory import PeakMeter
from gpt2.training_step import Stepper, build_model
from gpt2.transformer import ModelParts
from ra.variants import variant
from runtime import attention_kernels
from runtime.batch_plan import plan_batch
from runtime.resolved_target import ResolvedTarget
from runtime.settings import ANY_TARGET, GPT2, AlternationSettings, ModelConfig, OptimizerConfig

WARM_UP_STEPS = 3  # compile and allocate
MIDDLE = 10**6  # steps are timed in the middle of training, where +AQN= draws noise
# The optimizer of the plain case: constant rate.
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-4,
    min_learning_rate_ratio=1.0,
    warmup_fraction=0.0,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    epsilon=1e-8,
    grad_clip=1.0,
)
SMALLEST = Shape("smallest", 1, 1, 8, 2)
Step = Callable[[int], Any]  # takes an iteration
Change = Callable[[Stepper], None]  # changes a stepper before its first step


def time_case(
    shape: Shape, case: str, micro: int, seconds: float, change: Change | None = None
) -> dict[str, Any]:
    """Build a case, warm it up, and time its steps for so many seconds, at least one step. Call in a new worker.

    Returns the fields of bench.runner.CaseTiming except case, micro and round.
    """
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
    on_gpu, samples = resolved.device != "cpu", list[float]()
    synchronise = device_synchroniser(resolved.device)
    with kernels(case, resolved):
        if not on_gpu:
            load_libraries, _ = case_step(SMALLEST, case, 1, resolved)
            load_libraries(0)  # they are no memory of the case
        meter = PeakMeter(resolved.device)
        step, flops = case_step(shape, case, micro, resolved, change)
        for iteration in range(WARM_UP_STEPS):
            step(iteration)
        synchronise()
        with meter.phase("steps"):
            began = time.perf_counter()
            while not samples or time.perf_counter() - began < seconds:
                samples.append(timed_step(step, synchronise, on_gpu))
    return {
        "step_seconds": median(samples),
        "tokens_per_second": (shape.effective or micro) * shape.block_size / median(samples),
        # of all steps if the system cannot reset its high-water mark
        "peak_bytes": meter.by_phase.get("steps", meter.peaks()["allocated"]),
        "flops_per_token": flops,
    }


def timed_step(step: Step, synchronise: Callable[[], None], on_gpu: bool) -> float:
    """Return the mean seconds of a step, as in training.

    On a GPU a block of steps is timed, with one synchronisation at its end: a training loop launches a step while the
    previous one runs, so a synchronisation after each step would add the launch time.
    """
    steps = BLOCK_STEPS if on_gpu else 1
    before = time.perf_counter()
    for iteration in range(steps):
        step(iteration)
    synchronise()
    return (time.perf_counter() - before) / steps


def kernels(case: str, resolved: ResolvedTarget) -> AbstractContextManager[Any]:
    """Select the kernels of a case while it compiles and runs.

    Our cases use the target's fused attention, as in training. The plain case uses the kernel that torch prefers.
    """
    return contextlib.nullcontext() if case == PLAIN else attention_kernels.attention_context(resolved)


def random_batch(sizes: Sizes, sequences: int, device: str) -> torch.Tensor:
    """Draw token ids (sequences, T+1) int64, the same at every call."""
    size_ET = (sequences, sizes.block_size + 1)
    return torch.randint(GPT2.size, size_ET, generator=torch.Generator().manual_seed(0)).to(device)


def case_step(
    shape: Shape, case: str, micro: int, resolved: ResolvedTarget, change: Change | None = None
) -> tuple[Step, float]:
    """Build the optimizer step of a case on a fixed random batch. Returns it with its FLOPs a token.

    change: of the stepper of an arm.
    """
    ids_ET = random_batch(shape, shape.effective or micro, resolved.device)
    if case == PLAIN:
        plain = PlainStep(shape, GPT2.padded, resolved.device, shape.accumulation(micro))
        return lambda iteration: plain(ids_ET), build_model(
            *model_and_parts(shape, BASELINE)
        ).flops_per_token()
    stepper = make_stepper(shape, case, micro, resolved, shape.effective)
    if change:
        change(stepper)
    return lambda iteration: stepper.step(
        ids_ET, MIDDLE + iteration, 2 * MIDDLE
    ), stepper.model.flops_per_token()


def make_stepper(
    sizes: Sizes,
    case: str,
    micro: int,
    resolved: ResolvedTarget,
    effective: int = 0,
    seed: int = 0,
    learning_rate: float = 1e-4,
) -> Stepper:
    """Build the trainer's Stepper of an arm, compiled on a GPU as in training."""
    model, parts = model_and_parts(sizes, case)
    return Stepper(
        model,
        replace(OPTIMIZER, learning_rate=learning_rate),
        plan_batch(effective or micro, micro, 1, sizes.block_size),
        seed=seed,
        device=resolved.device,
        dtype=resolved.dtype,
        compile=resolved.device != "cpu",
        parts=parts,
    )


def model_config(sizes: Sizes) -> ModelConfig:
    return ModelConfig(sizes.name, sizes.layers, sizes.heads, sizes.width, sizes.block_size, 0.0)


def model_and_parts(sizes: Sizes, arm: str) -> tuple[ModelConfig, ModelParts]:
    """Return the arguments of gpt2.training_step.build_model for an arm."""
    chosen = variant(arm, model_config(sizes), AlternationSettings("output", 0.5, 1.0))
    return chosen.model, chosen.parts
