"""The inputs of a part of a model."""

from __future__ import annotations

from dataclasses import dataclass

from ra.settings import AlternationSettings


@dataclass(frozen=True)
class AttentionSpec:
    """The inputs of a part besides its layer. block_size: the largest number of positions."""

    layers: int
    heads: int
    width: int
    dropout: float
    alternation: AlternationSettings
    block_size: int
