"""Weights of GPT-2 between this project and transformers' GPT2LMHeadModel, in both directions.

    ours                          transformers
    token.weight (padded rows)    transformer.wte.weight, lm_head.weight (tied)
    position.weight               transformer.wpe.weight
    blocks.N.norm1, norm2         transformer.h.N.ln_1, ln_2
    blocks.N.attention.qkv, proj  transformer.h.N.attn.c_attn, c_proj (Conv1D: the matrix is transposed)
    blocks.N.mlp.fc, proj         transformer.h.N.mlp.c_fc, c_proj (Conv1D)
    norm                          transformer.ln_f

Leaf: torch and the standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

LAYER_NAMES = {
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}
CONV1D = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
CAUSAL_MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # buffers of older checkpoints
PREFIX = "transformer."


class WeightsError(ValueError):
    """The weights are not those of a GPT-2 of this size."""


def to_transformers(state: Mapping[str, Tensor], vocabulary: int) -> dict[str, Tensor]:
    """Return the state of GPT2LMHeadModel without its tied head. vocabulary: rows that are kept, without padding.

    WeightsError names a parameter that a standard GPT-2 does not have.
    """
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        other = _their_name(name)
        if other is None:
            raise WeightsError(f"{name} is not a parameter of GPT-2")
        if other == "wte.weight":
            value = value[:vocabulary]
        transposed = value.T if _is_conv1d(other) else value
        found[PREFIX + other] = transposed.contiguous()
    return found


def from_transformers(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights for a model of this project. expected: its state, whose padded rows and shapes are used.

    Reads the states of GPT2LMHeadModel and of GPT2Model. WeightsError names what is missing, unknown or of another
    shape.
    """
    given = {name.removeprefix(PREFIX): value for name, value in state.items()}
    given = {name: value for name, value in given.items() if not CAUSAL_MASKS.fullmatch(name)}
    head = given.pop("lm_head.weight", None)
    if head is not None and "wte.weight" in given and not torch.equal(head, given["wte.weight"]):
        raise WeightsError("lm_head.weight is not tied to wte.weight")
    found: dict[str, Tensor] = {}
    for name, place in expected.items():
        other = _their_name(name)
        if other is None or other not in given:
            raise WeightsError(f"{other or name} is missing")
        value = given.pop(other)
        value = value.T if _is_conv1d(other) else value
        if other == "wte.weight" and value.shape[0] < place.shape[0]:
            value = torch.cat([value, place[value.shape[0] :].to(value.dtype)])
        if value.shape != place.shape:
            raise WeightsError(f"{other} has shape {tuple(value.shape)}, not {tuple(place.shape)}")
        found[name] = value.to(place.dtype).contiguous()
    if given:
        raise WeightsError(f"{next(iter(given))} is unknown")
    return found


def _their_name(name: str) -> str | None:
    """Return the name without `transformer.`; None for a parameter that GPT-2 does not have."""
    plain = {
        "token.weight": "wte.weight",
        "position.weight": "wpe.weight",
        "norm.weight": "ln_f.weight",
        "norm.bias": "ln_f.bias",
    }
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None:
        return plain.get(name)
    layer, module, kind = match.groups()
    return f"h.{layer}.{LAYER_NAMES[module]}.{kind}" if module in LAYER_NAMES else None


def _is_conv1d(name: str) -> bool:
    return name.endswith(".weight") and any(f".{module}." in name for module in CONV1D)
