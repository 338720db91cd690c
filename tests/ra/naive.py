"""Naive RALEARN and loss, which store all scores and logits. The 2025 study ran out of memory with them.

References for tests of the fused ones.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ra.reciprocal_attention import LearnedAttention


class NaiveAttention(LearnedAttention):
    """Compute RALEARN from two (T, T) matrices of scores per head, which autograd stores for backward.

    The softmax is float32, as under autocast on a GPU. Its result is cast for the product with the values.
    """

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.merge(self.attend(*self.project(x_BTC)))

    def paths(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, ...]:
        scores_BHTT = q_BHTD @ k_BHTD.transpose(2, 3) / math.sqrt(q_BHTD.shape[3])
        wide = torch.promote_types(scores_BHTT.dtype, torch.float32)
        T = scores_BHTT.shape[3]
        future = torch.ones(T, T, dtype=torch.bool, device=scores_BHTT.device).triu(1)
        both = (scores_BHTT, scores_BHTT.transpose(2, 3))
        shares = [scores.masked_fill(future, -math.inf).softmax(3, dtype=wide) for scores in both]
        return shares[0] @ v_BHTD, shares[1] @ v_BHTD


def naive_loss(x_BTC: Tensor, weight_VC: Tensor, targets_BT: Tensor, vocabulary: int) -> Tensor:
    """Compute linear_cross_entropy from all logits at once, (B T, V), with softmax and gradient in float32."""
    logits_NV = F.linear(x_BTC, weight_VC).flatten(0, -2)[:, :vocabulary]
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    return F.cross_entropy(logits_NV.to(wide), targets_BT.flatten(), ignore_index=-1)
