"""Value residual: every layer mixes the first layer's values into its own.

y = W_O concat_heads(softmax(Q K^T / sqrt(D)) V'),  V'_l = lambda_1 V_1 + lambda_2 V_l in layer l,  V'_1 = V_1

Zhou et al. 2024, "Value Residual Learning" (arXiv:2410.17897), with learnable lambda_1 and lambda_2 that start at 0.5.
It adds two scalars per layer but the first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpt2.transformer import CausalSelfAttention, FirstValues
from ra.hooks import AttentionSpec


class ValueResidualAttention(CausalSelfAttention):
    """Attend to a learned mix of the first layer's values and those of this layer."""

    mixes_first_values = True

    def __init__(self, width: int, heads: int, dropout: float, layer: int) -> None:
        super().__init__(width, heads, dropout)
        self.lambdas = nn.Parameter(torch.full((2,), 0.5)) if layer else None

    def optimizer_settings(self) -> dict[str, float]:
        """Exempt the lambdas from weight decay."""
        return {} if self.lambdas is None else {"lambdas": 1.0}

    def learned_scalars(self) -> dict[str, float]:
        if self.lambdas is None:
            return {}
        first, own = self.lambdas.tolist()
        return {"lambda_1": first, "lambda_2": own}

    def forward(self, x_BTC: Tensor, first: FirstValues | None = None) -> Tensor:
        """Without `first`, compute the layer alone: its own values serve as those of the first layer."""
        first = first or FirstValues()
        q_BHTD, k_BHTD, v_BHTD = self.project(x_BTC)
        if self.lambdas is None and not torch.is_grad_enabled():
            v_BHTD = v_BHTD.clone()  # a view would hold the memory of q and k until the last layer
        if first.values is None:
            first.values = v_BHTD
        if self.lambdas is not None:
            lambda_1, lambda_2 = self.lambdas.unbind()
            v_BHTD = lambda_1 * first.values + lambda_2 * v_BHTD
        return self.merge(self.attend(q_BHTD, k_BHTD, v_BHTD))


def attention(layer: int, spec: AttentionSpec) -> ValueResidualAttention:
    """Build the attention of a layer."""
    return ValueResidualAttention(spec.width, spec.heads, spec.dropout, layer)
