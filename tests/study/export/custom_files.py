"""Custom variants as a user writes them: MINE has parts of all kinds, UNCACHED has no cache."""

MINE = '''"""Absolute keys, with parts of all kinds.

y_i = sum softmax(Q_i . |K_j|) V_j
"""
import gpt2.model.transformer as base
import torch
from gpt2.model import loss as unused
from ra.published.rms import norm as rms
from torch import nn

from ra.hooks import AttentionSpec


class Keys(base.CausalSelfAttention):
    def __init__(self, spec):
        super().__init__(spec.width, spec.heads, spec.dropout)
        self.register_buffer("signs", torch.rand(spec.width // spec.heads).sub(0.5).sign(), persistent=False)
        self.share = torch.rand(())  # no parameter and no buffer

    def attend(self, q_BHTD, k_BHTD, v_BHTD):
        return self.fused(q_BHTD * self.signs, k_BHTD.abs() * (1 + self.share), v_BHTD)


class Sinusoids(nn.Module):
    def forward(self, x_BTC, start=0):
        T, C = x_BTC.shape[1:]
        time = torch.arange(start, start + T, device=x_BTC.device)[:, None]
        angle = time * 10_000.0 ** (-torch.arange(0, C, 2, device=x_BTC.device) / C)
        return x_BTC + 0.02 * torch.cat([angle.sin(), angle.cos()], dim=1).to(x_BTC.dtype)


class Squared(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc, self.proj = base.ExpandLinear(width, 4 * width), base.UnsetLinear(4 * width, width)

    def forward(self, x_BTC):
        return self.proj(self.fc(x_BTC).relu().square())


def attention(layer: int, spec: AttentionSpec):
    return Keys(spec)


def norm(layer, spec):
    return nn.LayerNorm(spec.width, elementwise_affine=False) if layer else rms(layer, spec)


def mlp(layer, spec):
    return Squared(spec.width)


def position(spec):
    return Sinusoids()


recipe = {"learning_rate": 1e-3}
'''
UNCACHED = '''"""A mean over the past, of no kind that a cache knows."""
import torch
from torch import nn


class Mean(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x_BTC):
        count = torch.arange(1, x_BTC.shape[1] + 1, device=x_BTC.device)[:, None]
        return self.linear(x_BTC.cumsum(1) / count)


def attention(layer, spec):
    return Mean(spec.width)
'''
