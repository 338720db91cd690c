"""Attention with normalised queries and keys.

y_i = sum_{j<=i} softmax_j(norm(Q_i) . norm(K_j) / sqrt(D)) V_j
norm: RMSNorm over a head's D channels with learned gains.

Henry et al. 2020, "Query-Key Normalization for Transformers" (arXiv:2010.04245); with RMSNorm per head as in Qwen3
(arXiv:2505.09388). The scores stay bounded. It adds 2 x D gains per layer.
"""

from __future__ import annotations

from torch import Tensor, nn

from gpt2.transformer import CausalSelfAttention
from ra.hooks import AttentionSpec


class NormalisedAttention(CausalSelfAttention):
    """Normalise the query and the key of each head by their root mean square."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__(width, heads, dropout)
        self.query_norm = nn.RMSNorm(width // heads, eps=1e-6)
        self.key_norm = nn.RMSNorm(width // heads, eps=1e-6)

    def positioned(self, q_BHTD: Tensor, k_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise query and key, then rotate them where the position module of the model does that."""
        dtype = self.query_norm.weight.dtype
        query, key = self.query_norm(q_BHTD.to(dtype)), self.key_norm(k_BHTD.to(dtype))
        return super().positioned(query.to(q_BHTD.dtype), key.to(k_BHTD.dtype))


def attention(layer: int, spec: AttentionSpec) -> NormalisedAttention:
    """Build the attention of a layer."""
    return NormalisedAttention(spec.width, spec.heads, spec.dropout)
