"""Build the parts of a model from the name of an arm (ra.arms).

To add a custom variant, add one file `ra/custom/<name>.py` (lower case) with any of the functions of ra.hooks, such as

    def attention(layer: int, spec: AttentionSpec) -> torch.nn.Module: ...

It defines the variant <NAME> (upper case), which is trained, resumed, recorded and reported like the others. The
report compares it with the control arms. docs/variants.md shows an example.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from gpt2.transformer import CausalSelfAttention, ModelParts
from ra.arms import (
    COSTS,
    LEARNED,
    PATTERNS,
    Arm,
    VariantError,
    known_arm,
    known_variants,
    parse_arm,
    reciprocal_layers,
)
from ra.counts import count, matched_width
from ra.hooks import AttentionSpec, Hooks, load_hooks
from ra.noise import add_noise
from ra.noise_schedule import NoiseSchedule
from ra.reciprocal_attention import (
    LearnedAttention,
    LearnedHardAttention,
    LearnedScoreAttention,
    ReciprocalAttention,
)
from runtime.settings import AlternationSettings, Config, ModelConfig

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


@dataclass(frozen=True)
class Variant:
    """An arm for a model. parts: its modules. model: with the arm's width. recipe: field of OptimizerConfig -> value.

    cost_class: arms of one class run the same kernels, so they need the same time and memory. note: on the matched
    width; "" without one.
    """

    name: str
    parts: ModelParts
    cost_class: str
    model: ModelConfig
    recipe: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    def configure(self, config: Config) -> Config:
        """Return the settings of a run of this arm. VariantError if warm-up and decay are more than the budget."""
        recipe: dict[str, Any] = dict(self.recipe)
        warmup = recipe.get("warmup_fraction", 0.0)
        if warmup + config.optimizer.decay_fraction > 1:
            raise VariantError(
                f"{self.name}: warmup_fraction {warmup:g} and CONFIG_DECAY_FRACTION="
                f"{config.optimizer.decay_fraction:g} are more than the budget; fix: use at most 1 together"
            )
        return replace(config, model=self.model, optimizer=replace(config.optimizer, **recipe))


def variant(name: str, model: ModelConfig, alternation: AlternationSettings) -> Variant:
    """Build the arm `name` for a model. VariantError (of ra.arms) for an unknown name."""
    arm = known_arm(name, model.layers)
    width, note = _width(arm.model_name, model, alternation) if arm.match else (model.width, "")
    model = replace(model, width=width)
    hooks, cost_class = _hooks(arm, model, alternation)
    own_size = f"+WIDTH={width}" if arm.match else ""
    recipe = {**hooks.recipe, **dict(arm.recipe)}
    return Variant(name, ModelParts(**dict(hooks.parts)), cost_class + own_size, model, recipe, note)


def _hooks(arm: Arm, model: ModelConfig, alternation: AlternationSettings) -> tuple[Hooks, str]:
    """Return the parts of an arm at the sizes of a model, and its cost class."""
    spec = AttentionSpec(model.layers, model.heads, model.width, model.dropout, alternation, model.block_size)
    if arm.attention not in PATTERNS and arm.attention in known_variants():
        hooks, cost_class = load_hooks(arm.attention, spec), arm.attention
    elif arm.attention == LEARNED:
        attention, cost_class = _learned(spec)
        hooks = Hooks({"attention": attention})
    else:
        hooks, cost_class = Hooks({"attention": _fixed(arm.attention, spec)}), "standard"
    parts = dict(hooks.parts)
    for part, file in sorted(arm.parts):
        found = load_hooks(file, spec).parts
        if part not in found:
            raise VariantError(
                f"{arm.name}: {file.lower()}.py defines {', '.join(found) or 'no part'} and no {part}; fix: name "
                f"another file, or define {part} in it"
            )
        parts[part] = found[part]
        cost_class += f"+{part}={file.lower()}"
    if arm.noise:
        parts["norm"] = _noisy(parts.get("norm"), arm.noise, model)
        cost_class += "+aqn"
    return Hooks(parts, hooks.recipe), cost_class


def _noisy(
    norm: Callable[..., nn.Module] | None, schedule: NoiseSchedule, model: ModelConfig
) -> Callable[[int], nn.Module]:
    """Return the norms of an arm with noise: those in front of a projection, the last one if the schedule has it."""

    def build(layer: int) -> nn.Module:
        plain = norm(layer) if norm else nn.LayerNorm(model.width)
        return add_noise(plain, schedule) if layer < model.layers or schedule.final else plain

    return build


@functools.cache
def _width(name: str, model: ModelConfig, alternation: AlternationSettings) -> tuple[int, str]:
    """Return the width of an arm with +WIDTH=, and a note on what it costs. VariantError where it cannot be counted."""
    arm = known_arm(name, model.layers)
    assert arm.match

    def parts(attention: Arm) -> Callable[[ModelConfig], ModelParts]:
        return lambda sizes: ModelParts(**dict(_hooks(attention, sizes, alternation)[0].parts))

    cost, other = arm.match
    target = count(model, parts(parse_arm(other))(model)).of(cost)
    width = matched_width(model, parts(arm), cost, target)
    if width is None or not target:
        raise VariantError(
            f"{name}: the {COSTS[cost]} of {other} or of {arm.attention} cannot be counted, because a module does not "
            "run on tensors without memory; fix: remove +WIDTH="
        )
    sizes = replace(model, width=width)
    reached = count(sizes, parts(arm)(sizes)).of(cost)
    assert reached
    note = (
        f"{name} has width {width} (the study: {model.width}): {reached:,.0f} {COSTS[cost]}, {reached / target:.3f} "
        f"times those of {other}"
    )
    return width, note


def _fixed(name: str, spec: AttentionSpec) -> Callable[[int], nn.Module]:
    layers = reciprocal_layers(name, spec.layers)
    assert layers is not None  # None means a learned variant or one from a file
    attention = fixed(layers)
    return lambda layer: attention(layer, spec)


def _learned(spec: AttentionSpec) -> tuple[Callable[[int], nn.Module], str]:
    """Return the attention of RALEARN and its cost class."""
    settings = spec.alternation
    recomputed = "-recomputed" if settings.recompute else ""
    every = f"-every-{settings.gate_every}" if settings.gate_every > 1 else ""
    return lambda layer: learned(layer, spec), f"learned-{settings.mix}{recomputed}{every}"
