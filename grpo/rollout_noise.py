"""Noise on the norms of a Hugging Face model during the rollout: y = (gamma + Z) x_hat, Z ~ N(0, sigma^2).

In the rollout a norm has another weight tensor, gamma + Z. The trained tensor is never written, so it is equal to the
bit afterwards; `rollout_noise` compares the bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.initial_weights import keyed_normal
from ra.noise_schedule import NoiseError, NoiseSchedule

PROJECTED = (
    "input_layernorm",
    "post_attention_layernorm",
)  # in front of attention's and the MLP's projections
FINAL = "norm"  # in front of the head
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def noisy_norms(model: nn.Module, schedule: NoiseSchedule) -> dict[str, Any]:
    """Return the norms that get noise by name. NoiseError for a model without them.

    They are the RMSNorms and LayerNorms in front of a projection, named as in Llama, Mistral and Qwen.
    """
    names = (*PROJECTED, FINAL) if schedule.final else PROJECTED
    found = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in names
        and type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
        and isinstance(getattr(module, "weight", None), nn.Parameter)
    }
    if not found or (schedule.final and not any(name.rpartition(".")[2] == FINAL for name in found)):
        raise NoiseError(
            f"{type(model).__name__} has no norms named {', '.join(names)}, which noise needs; fix: another model, or "
            'CONFIG_GRPO_ARMS="baseline"'
        )
    return found


def draw(name: str, shape: torch.Size, sigma: float, seed: int, step: int) -> Tensor:
    """Draw the noise of a norm at a step: float32 on the CPU, a pure function of the arguments."""
    return keyed_normal(seed, f"aqn.{step}.{name}", shape).mul_(sigma)


@torch.no_grad()
def bit_sums(model: nn.Module) -> dict[str, int]:
    """Return the sum of each parameter's bits, read as integers."""
    return {
        name: int(parameter.detach().view(BITS[parameter.element_size()]).sum(dtype=torch.int64))
        for name, parameter in model.named_parameters()
    }


@contextlib.contextmanager
def rollout_noise(
    model: nn.Module, schedule: NoiseSchedule | None, seed: int, step: int, steps: int
) -> Iterator[float]:
    """Within the block, the model's norms have the noise of this step. Yields its standard deviation.

    RuntimeError if a weight differs in a bit afterwards.
    """
    sigma = schedule.sigma(step, steps) if schedule else 0.0
    norms = noisy_norms(model, schedule) if schedule and sigma else {}
    before = bit_sums(model)
    copies = {name: norm.weight.detach().clone() for name, norm in norms.items()}
    trained = {name: norm.weight for name, norm in norms.items()}
    try:
        for name, norm in norms.items():
            noise = draw(name, norm.weight.shape, sigma, seed, step)
            noisy = norm.weight.detach() + noise.to(norm.weight.device, norm.weight.dtype)
            norm.weight = nn.Parameter(noisy, requires_grad=False)
        yield sigma
    finally:
        for name, norm in norms.items():
            norm.weight = trained[name]
    changed = [name for name, total in bit_sums(model).items() if before.get(name) != total]
    changed += [name for name, copy in copies.items() if not torch.equal(copy, norms[name].weight)]
    if changed:
        raise RuntimeError(
            f"the rollout of step {step} changed {changed[0]} and {len(changed) - 1} more weights"
        )
