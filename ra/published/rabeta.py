"""Reciprocal attention with a learned beta: one reciprocal head in the three middle layers, added to the output.

y = W_O (concat_heads(softmax(Q K^T / sqrt(D)) V) + beta LN(W_R r)),  r = softmax(K Q^T / sqrt(D)) V of the last head

beta = tanh(b) starts at 0. mcgrof/knlp on GitHub, 2026: gpt2/model_knlp.py and docs/ra.md ("Learned mixing") of commit
041ec5f2, without its output gate. It adds (D + 3) C + 1 parameters to each of these layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.transformer import CausalSelfAttention, UnsetLinear
from ra.hooks import AttentionSpec

RECIPROCAL_LAYERS = 3


class LearnedBetaAttention(CausalSelfAttention):
    """Add the normalised output of a reciprocal head, times a learned beta."""

    def __init__(self, width: int, heads: int, dropout: float, learning_rate_multiplier: float) -> None:
        super().__init__(width, heads, dropout)
        self.attention_calls = 1 + 1 / heads
        self.learning_rate_multiplier = learning_rate_multiplier
        self.logit = nn.Parameter(torch.zeros(()))
        self.reciprocal = UnsetLinear(width // heads, width)
        self.norm = nn.LayerNorm(width)

    def optimizer_settings(self) -> dict[str, float]:
        """Give the logit the learning rate of RALEARN's logits."""
        return {"logit": self.learning_rate_multiplier}

    def learned_scalars(self) -> dict[str, float]:
        return {"beta": float(self.logit.detach().tanh())}

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = self.project(x_BTC)
        last = self.fused(k_BHTD[:, -1:], q_BHTD[:, -1:], v_BHTD[:, -1:])
        added = self.norm(self.reciprocal(self.concat_heads(last))) * self.logit.tanh()
        y_BTC = self.concat_heads(self.attend(q_BHTD, k_BHTD, v_BHTD))
        return F.dropout(self.proj(y_BTC + added.to(y_BTC.dtype)), self.dropout, self.training)


def attention(layer: int, spec: AttentionSpec) -> CausalSelfAttention:
    """Build the attention of a layer: learned beta in the middle layers, standard attention in the others."""
    first = spec.layers // 2 - RECIPROCAL_LAYERS // 2
    if not first <= layer < first + RECIPROCAL_LAYERS:
        return CausalSelfAttention(spec.width, spec.heads, spec.dropout)
    multiplier = spec.alternation.learning_rate_multiplier
    return LearnedBetaAttention(spec.width, spec.heads, spec.dropout, multiplier)
