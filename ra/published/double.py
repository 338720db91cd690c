"""Double attention: the standard and the reciprocal attention of every layer, added.

y = W_O concat_heads(softmax(Q K^T / sqrt(D)) V + softmax(K Q^T / sqrt(D)) V), each masked after the exchange

mcgrof/knlp on GitHub, 2025: docs/ra.md of commit aeb9b412 ("Double Attention") and class DoubleAttention in ra.py of
commit 19847bc3. It adds no parameters and a second attention call.
"""

from __future__ import annotations

from torch import Tensor

from gpt2.transformer import CausalSelfAttention
from ra.hooks import AttentionSpec


class DoubleAttention(CausalSelfAttention):
    """Add the outputs of both directions, with one set of projections and no learned weight."""

    attention_calls: float = 2

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        return self.fused(q_BHTD, k_BHTD, v_BHTD) + self.fused(k_BHTD, q_BHTD, v_BHTD)


def attention(layer: int, spec: AttentionSpec) -> DoubleAttention:
    """Build the attention of a layer."""
    return DoubleAttention(spec.width, spec.heads, spec.dropout)
