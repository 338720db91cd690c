"""A variant's name -> the attention of each layer.

To add a variant of your own, add one file: `ra/own/<name>.py` (lower case) with a function

    def attention(layer: int, spec: AttentionSpec) -> torch.nn.Module: ...

It is then the variant <NAME> (upper case), trained, resumed, recorded and reported like the others, and judged
against the noise floor as a real change. README shows one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from gpt2.config import ModelConfig
from gpt2.model import CausalSelfAttention
from ra.attention import (
    LearnedAttention,
    LearnedHardAttention,
    LearnedScoreAttention,
    ReciprocalAttention,
)
from ra.names import LEARNED, is_own, reciprocal_layers
from ra.settings import AlternationSettings

MIXES = {"output": LearnedAttention, "score": LearnedScoreAttention, "hard": LearnedHardAttention}


@dataclass(frozen=True)
class AttentionSpec:
    """What an attention module may depend on besides its layer."""

    layers: int
    heads: int
    width: int
    dropout: float
    alternation: AlternationSettings


@dataclass(frozen=True)
class Variant:
    """name; attention(layer) -> module.

    cost_class: variants of one class run the same kernels, so they cost the same time and memory.
    """

    name: str
    attention: Callable[[int], nn.Module]
    cost_class: str


def variant(name: str, model: ModelConfig, alternation: AlternationSettings) -> Variant:
    """The variant called `name` for that model; VariantError (of ra.names) for a name that is none."""
    spec = AttentionSpec(model.layers, model.heads, model.width, model.dropout, alternation)
    if is_own(name):
        own = importlib.import_module(f"ra.own.{name.lower()}")
        return Variant(name, lambda layer: own.attention(layer, spec), name)
    if name == LEARNED:
        return _learned(spec)
    layers = reciprocal_layers(name, model.layers)
    assert layers is not None  # None is a variant of another kind, handled above

    def attention(layer: int) -> nn.Module:
        kind = ReciprocalAttention if layer in layers else CausalSelfAttention
        return kind(spec.width, spec.heads, spec.dropout)

    return Variant(name, attention, "standard")


def _learned(spec: AttentionSpec) -> Variant:
    kind, settings = MIXES[spec.alternation.mix], spec.alternation

    def attention(layer: int) -> nn.Module:
        return kind(
            spec.width,
            spec.heads,
            spec.dropout,
            initial_probability=settings.initial_probability,
            learning_rate_multiplier=settings.learning_rate_multiplier,
            recompute=settings.recompute,
        )

    again = "-recomputed" if settings.recompute else ""
    return Variant(LEARNED, attention, f"learned-{settings.mix}{again}")
