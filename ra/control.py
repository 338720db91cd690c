"""The equivalence control: a reciprocal layer is a standard layer with W_Q and W_K renamed.

Start B as usual and a fixed reciprocal pattern with the rows of W_Q and W_K exchanged in its reciprocal layers: the
two are then the same function, and their losses must coincide step by step to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.config.batch import BatchPlan
from gpt2.config.config import ModelConfig, OptimizerConfig
from gpt2.model.transformer import GPT2, CausalSelfAttention
from gpt2.train.step import Stepper
from ra.names import reciprocal_layers
from ra.settings import AlternationSettings
from ra.variants import variant


@torch.no_grad()
def swap_query_and_key(model: GPT2, layers: Iterable[int]) -> None:
    """Exchange the rows of W_Q and W_K (weights and biases) in the given layers, in place."""
    for layer in layers:
        attention = model.blocks[layer].attention
        assert isinstance(attention, CausalSelfAttention)
        for parameter in (attention.qkv.weight, attention.qkv.bias):
            query, key, value = parameter.chunk(3)
            parameter.copy_(torch.cat([key, query, value]))


@dataclass(frozen=True)
class Control:
    """Losses in nats of each step, of B and of the swapped pattern."""

    name: str
    baseline: list[float]
    swapped: list[float]

    @property
    def largest_difference(self) -> float:
        return max(abs(a - b) for a, b in zip(self.baseline, self.swapped, strict=True))


def losses(
    name: str,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    batch: BatchPlan,
    batches: Callable[[int], Tensor],
    *,
    steps: int,
    seed: int,
    device: str,
    dtype: str,
    swap: bool,
) -> list[float]:
    """The loss of each of `steps` steps of a fixed variant; with `swap` from exchanged initial weights."""
    layers = reciprocal_layers(name, model.layers)
    if layers is None:
        raise ValueError(f"{name} is no fixed reciprocal pattern, so it is not the baseline renamed")
    unused = AlternationSettings("output", 0.5, 1.0)  # a fixed pattern learns no share
    stepper = Stepper(
        model,
        optimizer,
        batch,
        seed=seed,
        device=device,
        dtype=dtype,
        compile=False,
        attention=variant(name, model, unused).attention,
        alter=(lambda made: swap_query_and_key(made, layers)) if swap else None,
    )
    return [stepper.step(batches(k).to(device), k, steps).loss for k in range(steps)]
