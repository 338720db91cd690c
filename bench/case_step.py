"""A case of `make bench`, in the process that measures it: its step, how it is timed, and its peak memory.

case: "plain", a variant, or RALEARN:mix, or RALEARN:mix:k with the gate's gradient at every k-th step; B:again is B
with GELU and norms made again in backward.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.cases import AGAIN, PLAIN
from gpt2.hardware import attention_kernels

if TYPE_CHECKING:
    from gpt2.config.batch import BatchPlan
    from gpt2.config.config import OptimizerConfig
    from gpt2.hardware.resolve import ResolvedTarget
    from gpt2.train.peak_memory import PeakMeter
    from gpt2.train.step import Stepper

WARM_UP = 3  # steps that compile and take memory
BLOCK = 8  # steps of a GPU from one synchronisation to the next; more where a gate's every k-th needs it
Step = Callable[[int], Any]  # of an iteration


def serve(shape: dict[str, Any], case: str, micro: int) -> None:
    """Warm up, then for each line of seconds that comes in time steps for so long and answer with what was seen."""
    from gpt2.config.config import ANY_TARGET
    from gpt2.train.peak_memory import PeakMeter
    from gpt2.train.trainer import device_synchroniser

    resolved = attention_kernels.prepare_device(ANY_TARGET, model_of(shape))
    synchronise = device_synchroniser(resolved.device) if resolved.device != "cpu" else None
    meter = PeakMeter(resolved.device)
    step, flops, nanogpt = step_of(shape, case, micro, resolved)
    tokens = batch_of(shape, micro).tokens
    with kernels(case, resolved):
        for seconds, peak in turns(step, case, sys.stdin, meter, synchronise):
            answer = {
                "step_seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "peak_bytes": peak,
                "flops_per_token": flops,
                "nanogpt_flops_per_token": nanogpt,
            }
            print(json.dumps(answer), flush=True)


def turns(
    step: Step,
    case: str,
    lines: Iterable[str],
    meter: PeakMeter,
    synchronise: Callable[[], None] | None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[float, int]]:
    """Seconds of a step for each line of seconds to spend, and the peak bytes of the steps timed until then.

    What warming up takes, compiling included, is in neither. synchronise: waits for a GPU; None on a CPU, which is
    never ahead.
    """
    for iteration in range(WARM_UP):
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
        # by phase not where the system cannot reset its high-water mark
        yield median(samples), meter.by_phase.get("steps", meter.peaks()["allocated"])


def block_mean(step: Step, case: str, synchronise: Callable[[], None], clock: Callable[[], float]) -> float:
    """Seconds of a step on a GPU: the mean of a block of consecutive ones, synchronised at its end alone.

    A step that waits for nothing is launched while the one before it runs; synchronising after every step would
    charge it the time of its launch, which a training loop hides. The block begins at a multiple of the k of a gate
    that moves every k-th step and is a multiple of it long, so that its mean is that of training.
    """
    _, every = mix_of(case)
    steps = -(-BLOCK // every) * every
    before = clock()
    for iteration in range(steps):
        step(iteration)
    synchronise()
    return (clock() - before) / steps


def weighted_mean(step: Step, case: str, clock: Callable[[], float]) -> float:
    """Seconds of a step on a CPU: of each kind of step one, weighted by its share of all."""
    mean = 0.0
    for iteration, share in enumerate(shares(case)):
        before = clock()
        step(iteration)
        mean += share * (clock() - before)
    return mean


def shares(case: str) -> tuple[float, ...]:
    """Of all steps, the shares that cost what the first, the second ... of `case` do: every k-th may cost more."""
    _, every = mix_of(case)
    return (1.0,) if every == 1 else (1 / every, 1 - 1 / every)


def kernels(case: str, resolved: ResolvedTarget) -> AbstractContextManager[Any]:
    """Which attention kernels torch may take while a case compiles and runs: ours the target's fused ones, as in
    training; the plain step whichever torch prefers by itself, as a user would have it. And whether activations are
    made again in backward."""
    from gpt2.hardware import attention_kernels
    from gpt2.model import recompute

    if case == PLAIN:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(attention_kernels.attention_context(resolved, 0.0))
    if case.endswith(AGAIN):
        stack.enter_context(recompute.recompute_activations())
    return stack


def batch_of(shape: dict[str, Any], micro: int) -> BatchPlan:
    """How an optimizer step is put together; BatchError where the micro-batch does not divide it."""
    from gpt2.config.batch import plan_batch

    return plan_batch(shape.get("effective") or micro, micro, 1, shape["block_size"])


def step_of(
    shape: dict[str, Any], case: str, micro: int, resolved: ResolvedTarget
) -> tuple[Step, float, float]:
    """An optimizer step on a fixed random batch, and its FLOPs a token by the project's formula and nanoGPT's."""
    import torch

    from gpt2.config.config import VOCABULARY

    step, flops, nanogpt = (plain_step if case == PLAIN else our_step)(shape, case, micro, resolved)
    size_ET = (batch_of(shape, micro).effective, shape["block_size"] + 1)
    ids_ET = torch.randint(VOCABULARY, size_ET, generator=torch.Generator().manual_seed(0))
    ids_ET = ids_ET.to(resolved.device)
    return lambda iteration: step(ids_ET, iteration), flops, nanogpt


def plain_step(
    shape: dict[str, Any], case: str, micro: int, resolved: ResolvedTarget
) -> tuple[Any, float, float]:
    from bench.reference_gpt import PlainShape, PlainStep
    from gpt2.config.config import PADDED_VOCABULARY

    sizes: dict[str, int] = {name: shape[name] for name in ("layers", "heads", "width", "block_size")}
    accumulation = batch_of(shape, micro).accumulation
    step = PlainStep(PlainShape(**sizes, vocabulary=PADDED_VOCABULARY), resolved.device, accumulation)
    flops = our_model(shape, "B").flops_per_token()
    return lambda ids, iteration: step(ids), flops, nanogpt_flops(step.model, shape)


def our_step(
    shape: dict[str, Any], case: str, micro: int, resolved: ResolvedTarget
) -> tuple[Any, float, float]:
    stepper = stepper_of(shape, case, micro, resolved)
    return (
        lambda ids, iteration: stepper.step(ids, iteration, 10**9),
        stepper.model.flops_per_token(),
        nanogpt_flops(stepper.model, shape),
    )


def stepper_of(
    shape: dict[str, Any],
    case: str,
    micro: int,
    resolved: ResolvedTarget,
    seed: int = 0,
    learning_rate: float = 1e-4,
) -> Stepper:
    """What makes our steps, compiled on a GPU as in training."""
    from gpt2.train.step import Stepper

    model, attention = model_and_attention(shape, case)
    return Stepper(
        model,
        optimizer(learning_rate),
        batch_of(shape, micro),
        seed=seed,
        device=resolved.device,
        dtype=resolved.dtype,
        compile=resolved.device != "cpu",
        attention=attention,
    )


def optimizer(learning_rate: float = 1e-4) -> OptimizerConfig:
    """What the plain step has as well: a constant rate, weight decay 0.1, gradients clipped at norm 1."""
    from gpt2.config.config import OptimizerConfig

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


def model_of(shape: dict[str, Any]) -> Any:
    from gpt2.config.config import ModelConfig

    return ModelConfig(
        shape["name"], shape["layers"], shape["heads"], shape["width"], shape["block_size"], 0.0
    )


def model_and_attention(shape: dict[str, Any], case: str) -> tuple[Any, Any]:
    from ra.settings import AlternationSettings
    from ra.variants import variant

    mix, every = mix_of(case)
    model = model_of(shape)
    settings = AlternationSettings(mix or "output", 0.5, 1.0, gate_every=every)
    return model, variant(case.partition(":")[0], model, settings).attention


def mix_of(case: str) -> tuple[str, int]:
    """RALEARN:mix:k -> mix ("" for the default) and k (1)."""
    _, mix, every = [*case.removesuffix(AGAIN).split(":"), "", ""][:3]
    return mix, int(every or 1)


def our_model(shape: dict[str, Any], case: str) -> Any:
    from gpt2.train.step import build_model

    return build_model(*model_and_attention(shape, case))


def nanogpt_flops(model: Any, shape: dict[str, Any]) -> float:
    """FLOPs a token as nanoGPT counts them: 6 N + 12 L C T, N without the position embedding."""
    parameters = sum(p.numel() for p in model.parameters()) - shape["block_size"] * shape["width"]
    return float(6 * parameters + 12 * shape["layers"] * shape["width"] * shape["block_size"])
