"""A small language model whose head is tied to its embedding, and one step of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS = 32, 4
IDS = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.proj(y.transpose(1, 2).reshape(B, T, C))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Model(nn.Module):
    """recompute: the blocks are recomputed in backward."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 50, bias=False)
        self.lm_head.weight = self.wte.weight
        self.recompute = recompute

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), targets.flatten())


def model_of(dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    torch.manual_seed(1)
    return Model(**options).to(dtype)


def step(model: nn.Module, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients by name."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss: Tensor = model(IDS[:, :-1], IDS[:, 1:])
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def error(found: Tensor, true: Tensor) -> float:
    return float((found - true.double()).detach().double().norm() / true.detach().double().norm())
