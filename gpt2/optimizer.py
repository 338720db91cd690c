"""AdamW with GPT-2's parameter groups, and the learning rate as a function of progress."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import nn


def _module_settings(model: nn.Module) -> Iterator[tuple[nn.Parameter, float]]:
    """Yield (parameter, learning-rate multiplier) from the modules' `optimizer_settings`."""
    for module in model.modules():
        settings = getattr(module, "optimizer_settings", None)
        for name, multiplier in (settings() if settings else {}).items():
            yield getattr(module, name), multiplier


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Group parameters: matrices with weight decay; biases, norms and one-dimensional embeddings without.

    A module may define `optimizer_settings() -> {attribute: learning-rate multiplier}`. These parameters form further
    groups without weight decay, at that multiple of the learning rate (`lr_multiplier` of the group). Every trainable
    parameter is in exactly one group.
    """
    multipliers = {id(parameter): multiplier for parameter, multiplier in _module_settings(model)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    common = [p for p in trainable if id(p) not in multipliers]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in common if p.dim() >= 2], "weight_decay": weight_decay, "lr_multiplier": 1.0},
        {"params": [p for p in common if p.dim() < 2], "weight_decay": 0.0, "lr_multiplier": 1.0},
    ]
    for multiplier in sorted(set(multipliers.values())):
        members = [p for p in trainable if multipliers.get(id(p)) == multiplier]
        groups.append({"params": members, "weight_decay": 0.0, "lr_multiplier": multiplier})
    return [group for group in groups if group["params"]]


class AdamW(torch.optim.AdamW):
    """torch's AdamW without the guards that keep it out of compiled graphs: no graph here contains an optimizer.

    The first call of a guard loads torch._dynamo, which takes two seconds.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


Progress = float | Fraction


def learning_rate(
    progress: Progress,
    *,
    peak: float,
    warmup_fraction: Progress,
    minimum_ratio: float,
    schedule: str = "cosine",
    decay_fraction: Progress = 0.0,
) -> float:
    """Return the learning rate: linear warm-up, then a fall to `peak * minimum_ratio`.

    "cosine" falls from the warm-up on. "wsd" is stable, then falls as 1 - sqrt in the last `decay_fraction` (Hu et al.
    2024, arXiv:2404.06395; arXiv:2405.18392). progress: (iteration + 1) / planned iterations, so the first step has a
    positive rate and the last step the minimum. With Fractions, runs of two lengths have bitwise equal rates wherever
    their rates are equal.
    """
    progress = min(max(progress, 0.0), 1.0)
    wsd = schedule == "wsd"
    if progress < warmup_fraction:
        return peak * float(progress / warmup_fraction) if wsd else float(peak * progress / warmup_fraction)
    if wsd:
        decayed = progress - (1 - decay_fraction)
        if decayed <= 0:
            return peak
        fall = 1.0 - math.sqrt(min(decayed / decay_fraction, 1.0))
    else:
        decayed = (progress - warmup_fraction) / (1.0 - warmup_fraction) if warmup_fraction < 1.0 else 1.0
        fall = 0.5 * (1.0 + math.cos(math.pi * decayed))
    return peak * (minimum_ratio + (1.0 - minimum_ratio) * fall)


def warmup_iterations(iterations: int, warmup_fraction: float) -> int:
    """Return the warm-up iterations of a run, rounded to the nearest."""
    return round(Fraction(warmup_fraction) * iterations)


def decay_start(iterations: int, decay_fraction: float, warmup: int) -> int:
    """Return the iterations before the decay of "wsd". Every longer run has the same state after them.

    At least one iteration decays. Non-decreasing in `iterations`.
    """
    return max(warmup, iterations - max(1, round(Fraction(decay_fraction) * iterations)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set every group's rate to the common rate times its `lr_multiplier`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_multiplier"]
