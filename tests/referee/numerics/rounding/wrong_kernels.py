"""Wrong kernels: a function, its arguments, and what it should compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WrongKernel = tuple[Callable[..., Any], list[Any], Callable[..., Any]]
LOW = torch.bfloat16


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def narrow(x: Tensor) -> Tensor:
    """Round to bfloat16."""
    return x.to(LOW).to(x.dtype)


def half_statistics(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Keep mean and deviation in bfloat16."""
    mean = narrow(x.float().mean(-1, keepdim=True))
    scale = narrow(((x.float() - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt())
    return ((x.float() - mean) * scale * weight.float() + bias.float()).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def without_maximum(x: Tensor) -> Tensor:
    terms = x.float().exp()
    return (terms / terms.sum(-1, keepdim=True)).to(x.dtype)


def narrow_product(x: Tensor, w: Tensor) -> Tensor:
    return narrow(x) @ narrow(w)


def narrow_sum(x: Tensor, w: Tensor) -> Tensor:
    """Add the products one after the other in bfloat16."""
    total = torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype)
    for place in range(x.shape[1]):
        total = narrow(total + narrow(x[:, place, None] * w[None, place]))
    return total


def one_element(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return y + torch.zeros_like(y).index_put_((torch.tensor(3), torch.tensor(2)), y.detach().std() / 50)


class ReluGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        passed: Tensor = received[0] * (x > 0)
        return passed


class EmbeddingGradient(torch.autograd.Function):
    """Add the gradients of repeated tokens in bfloat16."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, table)
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> Any:
        tokens, table = ctx.saved_tensors
        total = torch.zeros(table.shape, dtype=LOW).index_add_(0, tokens, received[0].to(LOW))
        return None, total.to(table.dtype)


def one_pass_deviation(x: Tensor) -> Tensor:
    return (x.square().mean(-1) - x.mean(-1).square()).sqrt()


def rotate(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Turn pairs by the angles of their positions."""
    angles = change(torch.arange(len(x)).to(x)[:, None] * 10.0 ** -torch.arange(4).to(x))
    first, second = x.chunk(2, -1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1
    )


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, later: int) -> Tensor:
    """Attend to tokens up to `later` positions ahead."""
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(later)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


GAIN, SHIFT = 1 + draw(96, seed=1) / 10, draw(96, seed=2) / 10
X, W = draw(16, 96), draw(96, 24, seed=3)
HEADS = [draw(2, 2, 12, 8, seed=seed) for seed in range(3)]
IMAGE, FILTER = draw(2, 4, 9, 9), draw(6, 4, 3, 3, seed=1)
TOKENS = torch.arange(200) % 7
INVISIBLE = ("softmax without maximum", "log of a softmax")  # right on ordinary values
WRONG_KERNELS: dict[str, WrongKernel] = {
    "GELU by tanh": (tanh_gelu, [X], F.gelu),
    "GELU by erf": (F.gelu, [X], tanh_gelu),
    "GELU by a sigmoid": (lambda x: x * torch.sigmoid(1.702 * x), [X], F.gelu),
    "statistics in bfloat16": (half_statistics, [X, GAIN, SHIFT], layer_norm),
    "another eps": (lambda x, w, b: F.layer_norm(x, (96,), w, b, 1e-6), [X, GAIN, SHIFT], layer_norm),
    "eps outside the root": (
        lambda x: x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-5),
        [X],
        lambda x: F.rms_norm(x, (96,), eps=1e-5),
    ),
    "softmax without maximum": (without_maximum, [X], lambda x: F.softmax(x, -1)),
    "log of a softmax": (lambda x: F.softmax(x, -1).log(), [X], lambda x: F.log_softmax(x, -1)),
    "product in bfloat16": (narrow_product, [X, W], torch.matmul),
    "sum in bfloat16": (lambda x: narrow(x).sum(0, dtype=LOW).to(x.dtype), [X], lambda x: x.sum(0)),
    "one wrong element": (one_element, [X, W], torch.matmul),
    "gradient of another function": (ReluGradient.apply, [X], F.gelu),
    "embedding gradient in bfloat16": (EmbeddingGradient.apply, [TOKENS, draw(7, 24)], F.embedding),
    "one-pass variance": (one_pass_deviation, [X + 30], lambda x: x.std(-1, correction=0)),
    "variance with n - 1": (lambda x: x.var(-1), [draw(16, 999)], lambda x: x.var(-1, correction=0)),
    "angles in bfloat16": (lambda x: rotate(x, narrow), [draw(64, 8)], lambda x: rotate(x, lambda a: a)),
    "attention to one token more": (lambda q, k, v: attention(q, k, v, 8**-0.5, 1), HEADS, causal),
    "another scale of scores": (lambda q, k, v: attention(q, k, v, 0.36, 0), HEADS, causal),
    "convolution in bfloat16": (lambda x, w: F.conv2d(narrow(x), narrow(w)), [IMAGE, FILTER], F.conv2d),
    "statistics in bfloat16, bfloat16": (
        half_statistics,
        [X.to(LOW), GAIN.to(LOW), SHIFT.to(LOW)],
        layer_norm,
    ),
    "product in bfloat16, bfloat16": (narrow_sum, [X.to(LOW), W.to(LOW)], torch.matmul),
    "GELU by tanh, bfloat16": (tanh_gelu, [X.to(LOW)], F.gelu),
    "another eps, bfloat16": (
        lambda x, w, b: F.layer_norm(x, (96,), w, b, 1e-6),
        [X.to(LOW), GAIN.to(LOW), SHIFT.to(LOW)],
        layer_norm,
    ),
    "exponential by a polynomial, bfloat16": (
        lambda x: sum(x**k / math.factorial(k) for k in range(8)),
        [X.to(LOW).clamp(-2, 2)],
        torch.exp,
    ),
}
