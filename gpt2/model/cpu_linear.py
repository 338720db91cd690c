"""Linear layers of a CPU in float32, faster or in less memory than autograd makes them by itself.

Of the two libraries that torch brings for a CPU, F.linear asks MKL, whose product with a transposed matrix was slower
on an AMD processor than oneDNN's: in layers from a width of WIDE on, in training's head from HEAD_WIDE on (`make
bench PRODUCTS=1` shows it).
Elsewhere (a GPU, autocast, float64, torch.compile, a torch without oneDNN) layers are F.linear and F.gelu.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# columns of the input from which on oneDNN's product was no slower than MKL's
WIDE, HEAD_WIDE = 256, 64
BY_HAND = {"cpu"}  # kinds of device for which this module does anything; a prediction for a GPU empties it


def by_hand(x: Tensor) -> bool:
    """Whether this is a place for what this module does: a CPU, float32, neither autocast nor torch.compile."""
    return (
        x.device.type in BY_HAND
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def onednn(x: Tensor, least: int = WIDE) -> bool:
    """Whether a product of x (..., C) with a transposed matrix goes to oneDNN, as it does from `least` columns on."""
    return by_hand(x) and x.shape[-1] >= least and offered()


def offered() -> bool:
    """Whether this torch has oneDNN's product."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x: Tensor, weight_MC: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """x (..., C) @ weight_MC.T + bias_M by oneDNN, without gradients: what torch.compile calls on a CPU."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_MC, bias_M, "none", [], "")
    return out


def _gradients(ctx: Any, grad: Tensor, x: Tensor, weight_MC: Tensor) -> tuple[Tensor | None, ...]:
    """Of input, weight and bias: each where it is wanted."""
    need_x, need_weight, need_bias = ctx.needs_input_grad
    grad_NM = grad.reshape(-1, grad.shape[-1])
    grad_x = (grad_NM @ weight_MC).view(x.shape) if need_x else None
    grad_weight = grad_NM.T @ x.reshape(-1, x.shape[-1]) if need_weight else None
    return grad_x, grad_weight, grad_NM.sum(0) if need_bias else None


class _Linear(torch.autograd.Function):
    """F.linear with its forward product by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_MC: Tensor, bias_M: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_MC)
        return product(x, weight_MC, bias_M)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad_outputs[0], *ctx.saved_tensors)


class _GeluLinear(torch.autograd.Function):
    """F.linear(F.gelu(x)) that keeps x alone for backward and makes the GELU again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_MC: Tensor, bias_M: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_MC)
        return F.linear(F.gelu(x, approximate="tanh"), weight_MC, bias_M)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_MC = ctx.saved_tensors
        hidden = F.gelu(x, approximate="tanh")
        grad_hidden, grad_weight, grad_bias = _gradients(ctx, grad_outputs[0], hidden, weight_MC)
        del hidden
        if grad_hidden is None:
            return None, grad_weight, grad_bias
        return torch.ops.aten.gelu_backward(grad_hidden, x, approximate="tanh"), grad_weight, grad_bias


def linear(x: Tensor, weight_MC: Tensor, bias_M: Tensor) -> Tensor:
    """x (..., C), weight_MC (M, C), bias_M (M) -> x @ weight_MC.T + bias_M, (..., M)."""
    if not onednn(x):
        return F.linear(x, weight_MC, bias_M)
    if not torch.is_grad_enabled():
        return product(x, weight_MC, bias_M)
    y: Tensor = _Linear.apply(x, weight_MC, bias_M)
    return y


def gelu_again(x: Tensor) -> bool:
    """Whether backward makes the GELU of x again instead of keeping it."""
    return by_hand(x) and torch.is_grad_enabled()


def gelu_linear(x: Tensor, weight_MC: Tensor, bias_M: Tensor) -> Tensor:
    """gelu(x) @ weight_MC.T + bias_M with the tanh GELU, of which backward keeps x alone; shapes as `linear`'s."""
    y: Tensor = _GeluLinear.apply(x, weight_MC, bias_M)
    return y
