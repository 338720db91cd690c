"""Lens-gated attention: each head learns the shares of standard scores, reciprocal scores and discoverability.

A = softmax(w_std S + w_rec S^T + w_disc d),  S_ij = Q_i . K_j / sqrt(D),  d_j = K_j . u,  w = softmax(gates) per head

mcgrof/knlp on GitHub, 2025: gpt2/ra_lens_gpt2.py and docs/ra.md of commit 9ac34445, masked after the transposition. The
source subtracts the mean of d over time; it is left out, since no row of the softmax sees it. One call on
[w_std Q + sqrt(D) w_disc u, w_rec K] and [K, Q]. It adds 3 x heads + C parameters per layer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gpt2.transformer import CausalSelfAttention
from ra.hooks import AttentionSpec

INITIAL_GATES = (2.2, 0.6, 0.1)  # shares 0.76, 0.15 and 0.09


class LensAttention(CausalSelfAttention):
    """Mix three kinds of scores before the softmax, in one call of twice the head size."""

    attention_calls: float = 2  # one call of twice the head size

    def __init__(self, width: int, heads: int, dropout: float, learning_rate_multiplier: float) -> None:
        super().__init__(width, heads, dropout)
        self.learning_rate_multiplier = learning_rate_multiplier
        self.gates = nn.Parameter(torch.tensor(INITIAL_GATES).repeat(heads, 1))
        self.u = nn.Parameter(0.02 * torch.randn(heads, width // heads))

    def shares(self) -> Tensor:
        """Return w_std, w_rec and w_disc of each head, (3, H, 1, 1)."""
        return self.gates.softmax(1).T[..., None, None]

    def optimizer_settings(self) -> dict[str, float]:
        """Give the gates the learning rate of RALEARN's logits; exempt both parameters from weight decay."""
        return {"gates": self.learning_rate_multiplier, "u": 1.0}

    def learned_scalars(self) -> dict[str, float]:
        means = self.shares().detach().mean((1, 2, 3)).tolist()
        return dict(zip(("w_std", "w_rec", "w_disc"), means, strict=True))

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        D, (w_std, w_rec, w_disc) = v_BHTD.shape[-1], self.shares()
        query = torch.cat([w_std * q_BHTD + math.sqrt(D) * w_disc * self.u[:, None], w_rec * k_BHTD], dim=-1)
        key, value = torch.cat([k_BHTD, q_BHTD], dim=-1), nn.functional.pad(v_BHTD, (0, D))
        return self.fused(query.to(v_BHTD.dtype), key, value, scale=1 / math.sqrt(D))[..., :D]


def attention(layer: int, spec: AttentionSpec) -> LensAttention:
    """Build the attention of a layer."""
    return LensAttention(spec.width, spec.heads, spec.dropout, spec.alternation.learning_rate_multiplier)
