"""Differential attention: the difference of two softmax maps, each over half of a head's channels.

y = (1 - c) norm(A_1 V - lambda A_2 V),  A_n = softmax(Q_n K_n^T / sqrt(D / 2)),  norm: RMSNorm over a head's D channels
lambda = exp(a_1 . b_1) - exp(a_2 . b_2) + c,  c = 0.8 - 0.6 exp(-0.3 layer), layer 0, 1, ...

Ye et al. 2024, "Differential Transformer" (arXiv:2410.05258). It adds 3 D parameters per layer and a second call.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gpt2.transformer import CausalSelfAttention
from ra.hooks import AttentionSpec


class DifferentialAttention(CausalSelfAttention):
    """Subtract a learned share of a second attention map from the first."""

    attention_calls: float = 2

    def __init__(self, width: int, heads: int, dropout: float, layer: int) -> None:
        super().__init__(width, heads, dropout)
        size = width // heads
        if size % 2:
            raise ValueError(f"a head of {size} channels has no two halves; fix: use an even head size")
        self.constant = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.lambdas = nn.Parameter(0.1 * torch.randn(4, size // 2))  # a_1, b_1, a_2, b_2
        self.norm = nn.RMSNorm(size, eps=1e-5)

    def share(self) -> Tensor:
        """Return lambda, a scalar."""
        a_1, b_1, a_2, b_2 = self.lambdas.unbind()
        return torch.exp(a_1 @ b_1) - torch.exp(a_2 @ b_2) + self.constant

    def optimizer_settings(self) -> dict[str, float]:
        """Exempt the vectors of lambda from weight decay."""
        return {"lambdas": 1.0}

    def learned_scalars(self) -> dict[str, float]:
        return {"lambda": float(self.share().detach())}

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        half = q_BHTD.shape[-1] // 2
        # zeros in one half of the query remove that half from the scores
        first = nn.functional.pad(q_BHTD[..., :half], (0, half))
        second = nn.functional.pad(q_BHTD[..., half:], (half, 0))
        one, two = (self.fused(q, k_BHTD, v_BHTD, scale=1 / math.sqrt(half)) for q in (first, second))
        y_BHTD = one - self.share().to(one.dtype) * two
        normed: Tensor = self.norm(y_BHTD.to(self.norm.weight.dtype))
        return ((1 - self.constant) * normed).to(v_BHTD.dtype)


def attention(layer: int, spec: AttentionSpec) -> DifferentialAttention:
    """Build the attention of a layer."""
    return DifferentialAttention(spec.width, spec.heads, spec.dropout, layer)
