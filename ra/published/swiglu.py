"""SwiGLU in place of GPT-2's MLP, with as many parameters.

y = W_2 (silu(W_1 x + b_1) * (W_3 x + b_3)) + b_2,  silu(z) = z sigmoid(z)

Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202). The hidden size is the multiple of 8 next to 8/3 C,
where the three matrices have the parameters of GPT-2's two; matrix units need the multiple. The biases are those of
GPT-2's linear layers; the paper has none.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.transformer import ExpandLinear, UnsetLinear
from ra.hooks import AttentionSpec


class SwiGLU(nn.Module):
    """Width -> hidden -> width with a gated hidden layer. One product computes W_1 x and W_3 x."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        # 3 C h + 2 h + C parameters, as many as GPT-2's 8 C C + 5 C
        hidden = max(8, 8 * round((8 * width**2 + 4 * width) / (3 * width + 2) / 8))
        self.gate_up = ExpandLinear(width, 2 * hidden)  # W_1, then W_3
        self.proj = UnsetLinear(hidden, width)
        self.dropout = dropout

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTC).chunk(2, dim=-1)
        return F.dropout(self.proj(F.silu(gate) * up), self.dropout, self.training)


def mlp(layer: int, spec: AttentionSpec) -> SwiGLU:
    """Build the MLP of a layer."""
    return SwiGLU(spec.width, spec.dropout)
