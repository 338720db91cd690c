"""Build the attentions of the fixed patterns and of RALEARN, as a file of ra/published builds its attention."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from gpt2.transformer import CausalSelfAttention
from ra.attention import LearnedAttention, LearnedHardAttention, LearnedScoreAttention, ReciprocalAttention
from ra.hooks import AttentionSpec

MIXES = {"output": LearnedAttention, "score": LearnedScoreAttention, "hard": LearnedHardAttention}


def fixed(reciprocal: Collection[int]) -> Callable[[int, AttentionSpec], nn.Module]:
    """Return the function `attention` of a pattern whose layers `reciprocal` are reciprocal."""

    def attention(layer: int, spec: AttentionSpec) -> nn.Module:
        kind = ReciprocalAttention if layer in reciprocal else CausalSelfAttention
        return kind(spec.width, spec.heads, spec.dropout)

    return attention


def learned(layer: int, spec: AttentionSpec) -> nn.Module:
    """Build the attention of a layer of RALEARN."""
    settings = spec.alternation
    kind = MIXES[settings.mix]
    options: dict[str, Any] = {"gate_every": settings.gate_every} if kind is LearnedHardAttention else {}
    return kind(
        spec.width,
        spec.heads,
        spec.dropout,
        initial_probability=settings.initial_probability,
        learning_rate_multiplier=settings.learning_rate_multiplier,
        recompute=settings.recompute,
        **options,
    )
