"""AdamW with GPT-2's parameter groups, and the learning rate as a function of the budget's progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import nn


def _module_settings(model: nn.Module) -> Iterator[tuple[nn.Parameter, float]]:
    for module in model.modules():
        settings = getattr(module, "optimizer_settings", None)
        for name, multiplier in (settings() if settings else {}).items():
            yield getattr(module, name), multiplier


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices are decayed; biases, norms and embeddings of one dimension are not.

    A module may name parameters of its own in `optimizer_settings() -> {attribute: learning-rate multiplier}`:
    those form groups of their own, without weight decay, at that multiple of the learning rate. Each group
    carries `lr_multiplier`. Every trainable parameter is in exactly one group.
    """
    own = {id(parameter): multiplier for parameter, multiplier in _module_settings(model)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    common = [p for p in trainable if id(p) not in own]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in common if p.dim() >= 2], "weight_decay": weight_decay, "lr_multiplier": 1.0},
        {"params": [p for p in common if p.dim() < 2], "weight_decay": 0.0, "lr_multiplier": 1.0},
    ]
    for multiplier in sorted(set(own.values())):
        members = [p for p in trainable if own.get(id(p)) == multiplier]
        groups.append({"params": members, "weight_decay": 0.0, "lr_multiplier": multiplier})
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), fused where the device offers it."""
    groups = parameter_groups(model, weight_decay)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=True)


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
    """Linear warm-up, then what `schedule` says to `peak * minimum_ratio`: a pure function of progress in (0, 1].

    Progress is (iteration + 1) / planned iterations, so the first step has a positive rate and the last one
    ends at the minimum. Values outside are held at the ends. decay_fraction: the part at the end over which "wsd"
    falls. As Fractions the arguments are exact: two counts then give the same bits wherever the rates are the same.
    """
    progress = min(max(progress, 0.0), 1.0)
    return SCHEDULES[schedule](progress, peak, warmup_fraction, minimum_ratio, decay_fraction)


def _cosine(
    progress: Progress, peak: float, warmup_fraction: Progress, minimum_ratio: float, _: Progress
) -> float:
    if progress < warmup_fraction:
        return float(peak * progress / warmup_fraction)
    decay = (progress - warmup_fraction) / (1.0 - warmup_fraction) if warmup_fraction < 1.0 else 1.0
    cosine = 0.5 * (1.0 + math.cos(math.pi * decay))
    return peak * (minimum_ratio + (1.0 - minimum_ratio) * cosine)


def _wsd(
    progress: Progress, peak: float, warmup_fraction: Progress, minimum_ratio: float, decay_fraction: Progress
) -> float:
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395), the decay as 1 - sqrt (arXiv:2405.18392)."""
    if progress < warmup_fraction:
        return peak * float(progress / warmup_fraction)
    decayed = progress - (1 - decay_fraction)
    if decayed <= 0:
        return peak
    fall = 1.0 - math.sqrt(min(decayed / decay_fraction, 1.0))
    return peak * (minimum_ratio + (1.0 - minimum_ratio) * fall)


SCHEDULES: dict[str, Callable[[Progress, float, Progress, float, Progress], float]] = {
    "cosine": _cosine,
    "wsd": _wsd,
}


def warmup_iterations(iterations: int, warmup_fraction: float) -> int:
    """Iterations of the warm-up of a run of so many, to the nearest."""
    return round(Fraction(warmup_fraction) * iterations)


def decay_start(iterations: int, decay_fraction: float, warmup: int) -> int:
    """Iterations before the decay of "wsd": the state after them is that of every longer run as well.

    At least one iteration decays. Grows with `iterations`.
    """
    return max(warmup, iterations - max(1, round(Fraction(decay_fraction) * iterations)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group its rate: the common one times the group's `lr_multiplier`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_multiplier"]
