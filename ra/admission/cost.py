"""Count a variant's parameters, FLOPs, attention calls and memory beside the baseline's, and the widths that match."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from gpt2.config.config import ModelConfig
from gpt2.memory.prediction import predict
from gpt2.memory.workload import StepWorkload
from gpt2.model import cpu_linear
from gpt2.model.init import keyed_generator
from ra.admission.probe import OPTIMIZER
from ra.admission.results import Cost, Costs
from ra.settings import AlternationSettings
from ra.variants import variant

BASELINE = "B"


def costs(name: str, model: ModelConfig, alternation: AlternationSettings) -> Costs:
    """Measure the variant and the baseline at the study's shape, without allocating the model."""

    def at_width(heads: int) -> tuple[float, float | None]:
        size = model.width // model.heads
        return _counts(name, replace(model, heads=heads, width=heads * size), alternation)[:2]

    ours, base = (_cost(each, model, alternation) for each in (name, BASELINE))
    return Costs(
        ours,
        base,
        width_equal_parameters=_matching(lambda heads: at_width(heads)[0], base.parameters, model),
        width_equal_flops=_matching(lambda heads: at_width(heads)[1], base.flops_per_token, model),
    )


def _cost(name: str, model: ModelConfig, alternation: AlternationSettings) -> Cost:
    parameters, flops, calls = _counts(name, model, alternation)
    try:
        attention = variant(name, model, alternation).attention
        work = StepWorkload(model, OPTIMIZER, attention, 1, 1, "cpu", "float32", False)
        memory = predict(work).peak_bytes
    except (Exception, SystemExit):  # the user's code may not run on tensors without memory
        memory = None
    return Cost(parameters, flops, calls, memory)


def _counts(
    name: str, model: ModelConfig, alternation: AlternationSettings
) -> tuple[int, float | None, float | None]:
    """Parameters, training FLOPs of a token (3 x forward) and fused attention calls of a layer.

    FLOPs and calls are those of one pass over a block in training; None where it cannot run without memory.
    """
    build = variant(name, model, alternation).attention
    C, T = model.width, model.block_size
    parameters = model.layers * (8 * C * C + 9 * C) + (model.padded_vocabulary + T + 2) * C
    flops: float | None = 3 * 2 * (model.layers * 8 * C * C + model.vocabulary * C)
    calls = 0
    for layer in range(model.layers):
        with FakeTensorMode(allow_non_fake_inputs=True), keyed_generator(0, f"blocks.{layer}.attention"):
            try:
                module = build(layer)
                parameters += sum(p.numel() for p in module.parameters())
                forward, made = _attention_flops(module, C, T)
            except (Exception, SystemExit):
                return parameters, None, None
        calls += made
        flops = flops + 3 * forward / T if flops is not None else None
    return parameters, flops, calls / model.layers


def _attention_flops(module: nn.Module, width: int, tokens: int) -> tuple[float, int]:
    """Forward FLOPs of an attention on one sequence, and its fused calls. A causal call counts half of T x T."""
    calls, kernels = _FusedCalls(), cpu_linear.CPU_KERNEL_DEVICES
    cpu_linear.CPU_KERNEL_DEVICES = set()  # the counter does not know oneDNN's product
    try:
        with FlopCounterMode(display=False) as counter, calls:
            module.train()(torch.empty(1, tokens, width))
    finally:
        cpu_linear.CPU_KERNEL_DEVICES = kernels
    return counter.get_total_flops() + calls.flops, calls.count


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


def _matching(count: Callable[[int], float | None], target: float | None, model: ModelConfig) -> int | None:
    """The width, a multiple of the head size, whose count is nearest to `target`."""
    now = count(model.heads)
    if now is None or target is None:
        return None
    guess = max(1, round(model.heads * math.sqrt(target / now)))
    sizes = {model.heads: now}
    try:
        for heads in range(max(1, guess - 1), guess + 2):
            found = sizes.get(heads) or count(heads)
            if found is not None:
                sizes[heads] = found
    except (Exception, SystemExit):  # a number of heads that the variant does not allow
        pass
    best = min(sizes, key=lambda heads: abs(sizes[heads] - target))
    return best * (model.width // model.heads)
