"""Run the equivalence control: a reciprocal layer is a standard layer with W_Q and W_K renamed.

Start B as usual. Start a fixed reciprocal pattern with W_Q and W_K exchanged in its reciprocal layers. The two are
the same function, so their losses coincide at every step to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from gpt2.training_step import Stepper
from gpt2.transformer import GPT2, CausalSelfAttention
from ra.arms import reciprocal_layers
from ra.reciprocal_attention import exchange_query_and_key
from ra.variants import variant
from runtime.batch_plan import BatchPlan
from runtime.settings import AlternationSettings, ModelConfig, OptimizerConfig


def swap_query_and_key(model: GPT2, layers: Iterable[int]) -> None:
    """Exchange the rows of W_Q and W_K (weights and biases) in the given layers, in place."""
    for layer in layers:
        attention = model.blocks[layer].attention
        assert isinstance(attention, CausalSelfAttention)
        exchange_query_and_key(attention)


@dataclass(frozen=True)
class Control:
    """The losses of every step in nats, of B and of the swapped pattern."""

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
    """Train a fixed variant for `steps` steps and return each step's loss. swap: exchange initial W_Q and W_K."""
    layers = reciprocal_layers(name, model.layers)
    if layers is None:
        raise ValueError(
            f"{name} is not a fixed reciprocal pattern, so it differs from the baseline's function class"
        )
    unused = AlternationSettings("output", 0.5, 1.0)  # only RALEARN reads these
    stepper = Stepper(
        model,
        optimizer,
        batch,
        seed=seed,
        device=device,
        dtype=dtype,
        compile=False,
        parts=variant(name, model, unused).parts,
    )
    if swap:
        swap_query_and_key(stepper.model, layers)
    return [stepper.step(batches(k).to(device), k, steps).loss for k in range(steps)]
