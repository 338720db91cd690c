"""Small operations in place of fused ones: attention, GELU, LayerNorm and cross-entropy.

Each function has the signature of torch.nn.functional's. Inputs of half precision are computed in float32; the result
has the dtype of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn._reduction import legacy_get_string

HALF = (torch.bfloat16, torch.float16)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled dot-product attention by two products and a softmax; memory of T x T.

    query (..., T, D), key and value (..., S, D). A row whose keys are all masked is 0, as torch's is.
    """
    dtype = query.dtype
    query, key, value = _wide(query), _wide(key), _wide(value)
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + _wide(attn_mask)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)  # its gradient is 0, not NaN
    exponentials = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    weights = (exponentials / exponentials.sum(-1, keepdim=True)).masked_fill(empty, 0.0)
    if dropout_p:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    return (weights @ value).to(dtype)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Compute x Phi(x), or its tanh approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    x = _wide(input)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return (0.5 * x * (1 + torch.tanh(inner))).to(input.dtype)
    return (0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))).to(input.dtype)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Compute (x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions (Ba et al. 2016)."""
    x = _wide(input)
    dimensions = tuple(range(-len(normalized_shape), 0))
    centered = x - x.mean(dimensions, keepdim=True)
    y = centered / (centered.square().mean(dimensions, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * _wide(weight)
    return (y if bias is None else y + _wide(bias)).to(input.dtype)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the cross-entropy in nats. input (N, C, ...) or (C,); target: classes, or probabilities as input.

    size_average, reduce: names of torch before `reduction`, which they overrule.
    """
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce, emit_warning=False)
    x = _wide(input)
    classes = 0 if x.dim() == 1 else 1
    x = x.movedim(classes, -1)
    shifted = x - x.amax(-1, keepdim=True).detach()
    log_probs = shifted - shifted.exp().sum(-1, keepdim=True).log()
    weights = torch.ones_like(log_probs[..., :1]).expand_as(log_probs) if weight is None else _wide(weight)
    if target.is_floating_point():
        wanted = _wide(target).movedim(classes, -1)
        wanted = wanted * (1 - label_smoothing) + label_smoothing / x.shape[-1]
        losses = -(wanted * log_probs * weights).sum(-1)
        total = torch.as_tensor(float(losses.numel()), device=x.device, dtype=x.dtype)
    else:
        scored = target != ignore_index
        index = target.masked_fill(~scored, 0)[..., None]
        of_target = weights.expand_as(log_probs).gather(-1, index)[..., 0]
        smooth = -(log_probs * weights).sum(-1) * (label_smoothing / x.shape[-1])
        losses = -log_probs.gather(-1, index)[..., 0] * of_target * (1 - label_smoothing) + smooth
        losses = losses.masked_fill(~scored, 0.0)
        total = (of_target * scored).sum()
    if reduction == "none":
        return losses.to(input.dtype)
    summed = losses.sum()
    return (summed / total if reduction == "mean" else summed).to(input.dtype)


# name of a function of torch -> its replacement
SMALL: Mapping[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": attention,
    "gelu": gelu,
    "layer_norm": layer_norm,
    "cross_entropy": cross_entropy,
}
NAMES = {"attention": "scaled_dot_product_attention"}  # other names that a pattern may use
