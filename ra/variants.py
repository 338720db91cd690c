"""Build the attention of each layer from a variant's name.

To add a custom variant, add one file `ra/custom/<name>.py` (lower case) with a function

    def attention(layer: int, spec: AttentionSpec) -> torch.nn.Module: ...

It defines the variant <NAME> (upper case), which is trained, resumed, recorded and reported like the others. The
report compares it with the control arms. docs/variants.md shows an example.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from gpt2.config.config import ModelConfig
from gpt2.model.init import keyed_generator
from gpt2.model.transformer import CausalSelfAttention
from ra.attention import LearnedAttention, LearnedHardAttention, LearnedScoreAttention, ReciprocalAttention
from ra.names import LEARNED, PATTERNS, VariantError, is_custom, known_variants, reciprocal_layers, source
from ra.settings import AlternationSettings

MIXES = {"output": LearnedAttention, "score": LearnedScoreAttention, "hard": LearnedHardAttention}


@dataclass(frozen=True)
class AttentionSpec:
    """The inputs of an attention module besides its layer. block_size: the largest number of positions."""

    layers: int
    heads: int
    width: int
    dropout: float
    alternation: AlternationSettings
    block_size: int


@dataclass(frozen=True)
class Variant:
    """A variant. attention: layer -> module.

    cost_class: variants of one class run the same kernels, so they need the same time and memory.
    """

    name: str
    attention: Callable[[int], nn.Module]
    cost_class: str


def variant(name: str, model: ModelConfig, alternation: AlternationSettings) -> Variant:
    """Build the variant `name` for a model. VariantError (of ra.names) for an unknown name."""
    spec = AttentionSpec(model.layers, model.heads, model.width, model.dropout, alternation, model.block_size)
    if name == LEARNED:
        return _learned(spec)
    if name not in PATTERNS and name in known_variants():
        return _from_file(name, spec)
    layers = reciprocal_layers(name, model.layers)
    assert layers is not None  # None means a learned variant or one from a file, handled above

    def attention(layer: int) -> nn.Module:
        kind = ReciprocalAttention if layer in layers else CausalSelfAttention
        return kind(spec.width, spec.heads, spec.dropout)

    return Variant(name, attention, "standard")


def _from_file(name: str, spec: AttentionSpec) -> Variant:
    """Import a published or custom variant. VariantError names the faulty line of its file."""
    path, folder = source(name), "custom" if is_custom(name) else "published"
    try:
        module = importlib.import_module(f"ra.{folder}.{path.stem}")
        with keyed_generator(0, name):  # its random draws change no other draws
            first = module.attention(0, spec)
        if not isinstance(first, nn.Module):
            raise TypeError(f"attention(0, spec) returned {type(first).__name__}, not a torch.nn.Module")
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        frames = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1] if frames else None
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise VariantError(
            f"{name}: ra/{folder}/{path.name}{f', line {line}' if line else ''}: {message}; fix: define a "
            "function attention(layer, spec) that returns a torch.nn.Module (see docs/variants.md)"
        ) from error
    return Variant(name, lambda layer: module.attention(layer, spec), name)


def _learned(spec: AttentionSpec) -> Variant:
    kind, settings = MIXES[spec.alternation.mix], spec.alternation
    options = {"gate_every": settings.gate_every} if kind is LearnedHardAttention else {}

    def attention(layer: int) -> nn.Module:
        return kind(
            spec.width,
            spec.heads,
            spec.dropout,
            initial_probability=settings.initial_probability,
            learning_rate_multiplier=settings.learning_rate_multiplier,
            recompute=settings.recompute,
            **options,
        )

    recomputed = "-recomputed" if settings.recompute else ""
    every = f"-every-{settings.gate_every}" if settings.gate_every > 1 else ""
    return Variant(LEARNED, attention, f"learned-{settings.mix}{recomputed}{every}")
