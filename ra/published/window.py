"""Sliding-window attention: position i sees the last W positions, W a quarter of the block size.

y_i = sum_{i-W<j<=i} softmax_j(Q_i . K_j / sqrt(D)) V_j

Beltagy et al. 2020, "Longformer" (arXiv:2004.05150); Jiang et al. 2023, "Mistral 7B" (arXiv:2310.06825). Each block of
W queries attends to its own and the previous block of keys, so memory and FLOPs are linear in T.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.transformer import CausalSelfAttention
from ra.hooks import AttentionSpec


class WindowAttention(CausalSelfAttention):
    """Attend to the last `window` positions, the present one included."""

    def __init__(self, width: int, heads: int, dropout: float, window: int, block_size: int) -> None:
        super().__init__(width, heads, dropout)
        self.window = window
        # pairs of positions, relative to block_size^2 / 2 of full causal attention
        self.attention_calls = (2 * window * block_size - window**2) / block_size**2

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        B, H, T, D = q_BHTD.shape
        W = self.window
        if T <= W:
            return self.fused(q_BHTD, k_BHTD, v_BHTD)
        # N blocks of W positions, (B H, N, W, D); the last one is padded
        q, k, v = (F.pad(x, (0, 0, 0, -T % W)).reshape(B * H, -1, W, D) for x in (q_BHTD, k_BHTD, v_BHTD))
        k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1], x], dim=2) for x in (k, v))
        offset = torch.arange(2 * W, device=q.device) - torch.arange(1, W + 1, device=q.device)[:, None]
        seen_WS = (offset >= 0) & (offset < W)  # key S of the two blocks is W - 1 - offset positions before
        first_WS = seen_WS & (torch.arange(2 * W, device=q.device) >= W)  # block 0 has no previous block
        mask_NWS = torch.cat([first_WS[None], seen_WS.expand(q.shape[1] - 1, -1, -1)])
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask_NWS[None],
            dropout_p=dropout,  # fused kernels need four dimensions
        )
        return y.reshape(B, H, -1, D)[:, :, :T]


def attention(layer: int, spec: AttentionSpec) -> WindowAttention:
    """Build the attention of a layer."""
    window = max(1, spec.block_size // 4)
    return WindowAttention(spec.width, spec.heads, spec.dropout, window, spec.block_size)
