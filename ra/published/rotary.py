"""Rotary position embedding: queries and keys are rotated by their positions; no embedding is added.

(q'_2m, q'_2m+1) = (q_2m cos a - q_2m+1 sin a, q_2m sin a + q_2m+1 cos a),  a = position * 10000^(-2m / D),  k alike

So Q'_i . K'_j depends on the positions through i - j alone.
Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv:2104.09864), with the paper's
neighbouring pairs of channels. It removes the block size x C weights of the learned embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ra.hooks import AttentionSpec

BASE = 10_000.0


class RotaryPosition(nn.Module):
    """Rotate queries and keys. The cosines and sines are float32 tables (block size, D / 2), not saved."""

    cos: Tensor
    sin: Tensor

    def __init__(self, block_size: int, size: int) -> None:
        super().__init__()
        if size % 2:
            raise ValueError(f"a head of {size} channels has no pairs; fix: use an even head size")
        rate = BASE ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.outer(torch.arange(block_size, dtype=torch.float64), rate)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, x_BTC: Tensor, start: int = 0) -> Tensor:
        """Return the token embeddings unchanged."""
        return x_BTC

    def rotate(self, q_BHTD: Tensor, k_BHTD: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Rotate the queries and keys of positions start .. start+T-1."""
        T = q_BHTD.shape[2]
        tables = self.cos[start : start + T], self.sin[start : start + T]
        return _rotated(q_BHTD, *tables), _rotated(k_BHTD, *tables)


def _rotated(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x_BHTD.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(x_BHTD.dtype)


def position(spec: AttentionSpec) -> RotaryPosition:
    """Build the positions of a model."""
    return RotaryPosition(spec.block_size, spec.width // spec.heads)
