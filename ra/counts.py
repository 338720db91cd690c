"""Count the parameters and FLOPs of a model, and find the width at which a variant costs as much as another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from gpt2.cpu_linear import standard_kernels
from gpt2.training_step import build_model
from gpt2.transformer import ModelParts
from runtime.settings import ModelConfig

BuildParts = Callable[[ModelConfig], ModelParts]  # at the sizes of the model
SEARCHED = 4  # multiples of the heads on either side of the guess


@dataclass(frozen=True)
class Counts:
    """parameters: of the model, padded vocabulary included. flops: of a training token. calls: fused, a layer.

    flops and calls are None where the model does not run on tensors without memory.
    """

    parameters: int
    flops: float | None
    calls: float | None

    def of(self, cost: str) -> float | None:
        """The parameters for "match", the FLOPs for "flops"."""
        return self.parameters if cost == "match" else self.flops


def count(model: ModelConfig, parts: ModelParts) -> Counts:
    """Count parameters, training FLOPs of a token (3 x forward) and fused attention calls of a layer.

    FLOPs and calls are those of one pass over a block. A causal call counts half of T x T. Nothing is allocated.
    """
    T, calls = model.block_size, _FusedCalls()
    with (
        standard_kernels(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):  # the counter does not know oneDNN's product
        built = build_model(model, parts)
        parameters = sum(p.numel() for p in built.parameters())
        try:
            with FlopCounterMode(display=False) as counter, calls:
                built.train().hidden(torch.zeros(1, T, dtype=torch.int64))
        except (Exception, SystemExit):  # the user's code may raise anything
            return Counts(parameters, None, None)
    forward = (counter.get_total_flops() + calls.flops) / T + 2 * model.vocabulary * model.width
    return Counts(parameters, 3 * forward, calls.count / model.layers)


class _FusedCalls(TorchFunctionMode):
    """Count the calls of scaled_dot_product_attention and their FLOPs, which the CPU's kernel hides from torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.flops = 0, 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]
        self.count += 1
        pairs = math.prod(query.shape[:-1]) * key.shape[-2]
        half = 0.5 if (kwargs or {}).get("is_causal") else 1.0
        self.flops += half * 2 * pairs * (query.shape[-1] + value.shape[-1])
        return query.new_empty((*query.shape[:-1], value.shape[-1]))


def parameter_count(model: ModelConfig, parts: ModelParts) -> int:
    """Count the parameters of a model, as `count` does, without a pass."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return sum(p.numel() for p in build_model(model, parts).parameters())


def matched_width(model: ModelConfig, build: BuildParts, cost: str, target: float | None) -> int | None:
    """Return the width whose cost is nearest to `target`, a multiple of the model's heads.

    cost: a value of WIDTH. None where the cost cannot be counted.
    """

    def at(width: int) -> float | None:
        sizes = replace(model, width=width)
        try:
            if cost == "match":
                return parameter_count(sizes, build(sizes))
            return count(sizes, build(sizes)).of(cost)
        except (Exception, SystemExit):  # a width that the variant does not allow
            return None

    now = at(model.width)
    if now is None or target is None:
        return None
    found = {model.width: now}
    guess = round(model.width * math.sqrt(target / now) / model.heads)
    for multiple in range(max(1, guess - SEARCHED), guess + SEARCHED + 1):
        width = multiple * model.heads
        cost_there = found.get(width) or at(width)
        if cost_there is not None:
            found[width] = cost_there
    return min(found, key=lambda width: abs(found[width] - target))
