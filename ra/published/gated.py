"""Attention with an output gate.

y = W_O (concat_heads(softmax(Q K^T / sqrt(D)) V) * sigmoid(W_G x + b_G)), one gate per channel.

Qiu et al. 2025, "Gated Attention for Large Language Models" (arXiv:2505.06708): the elementwise gate on the output of
the fused attention, which they found best among the positions. b_G is that of GPT-2's linear layers; the paper has
none. It adds C x C weights and C biases per layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.transformer import CausalSelfAttention, UnsetLinear
from ra.hooks import AttentionSpec


class GatedAttention(CausalSelfAttention):
    """Multiply the heads' outputs by a sigmoid gate of the input, before the output projection."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__(width, heads, dropout)
        self.gate = UnsetLinear(width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y_BTC = self.concat_heads(self.attend(*self.project(x_BTC)))
        y_BTC = self.proj(y_BTC * torch.sigmoid(self.gate(x_BTC)))
        return F.dropout(y_BTC, self.dropout, self.training)


def attention(layer: int, spec: AttentionSpec) -> GatedAttention:
    """Build the attention of a layer."""
    return GatedAttention(spec.width, spec.heads, spec.dropout)
