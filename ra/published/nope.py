"""No positions: the causal mask is the only source of order.

Kazemnejad et al. 2023, arXiv:2305.19466 (NoPE). It has T x C weights less than the learned embedding.
"""

from __future__ import annotations

from torch import Tensor, nn

from ra.hooks import AttentionSpec


class NoPosition(nn.Module):
    """Return the token embeddings unchanged."""

    def forward(self, x_BTC: Tensor, start: int = 0) -> Tensor:
        return x_BTC


def position(spec: AttentionSpec) -> NoPosition:
    return NoPosition()
