"""Linear layers for a CPU in float32: faster, or smaller in memory, than autograd's default.

F.linear calls MKL. On an AMD processor MKL's product with a transposed matrix was slower than oneDNN's, from
MIN_WIDTH columns on in the layers and from MIN_HEAD_WIDTH columns on in the training head (docs/results,
2026-11-21-cpu-speed). On a GPU, under autocast or torch.compile, in float64, and where torch lacks oneDNN, the layers
are F.linear and F.gelu.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MOST_SAVED = (
    2**20
)  # bytes of an activation that is saved: recomputing it would slow a small model's step by 5 %


def is_small(*tensors: Tensor) -> bool:
    """Whether each tensor is saved for backward instead of recomputed."""
    return all(tensor.nbytes <= MOST_SAVED for tensor in tensors)


def checkpoint_through_linear(
    function: Callable[..., Tensor],
    linear: Callable[[Tensor], Tensor],
    *arguments: Tensor,
    random: bool = False,
) -> Tensor:
    """Compute linear(function(*arguments)). Saves the arguments only and recomputes function's result in backward.

    Small arguments save what autograd saves; the first checkpoint of a process imports torch._dynamo, which takes 2 s.
    random: the function draws random numbers; backward draws the same ones.
    """

    def checkpointed(inner: Callable[..., Tensor]) -> Tensor:
        y: Tensor = checkpoint(
            inner, *arguments, use_reentrant=False, preserve_rng_state=random, determinism_check="none"
        )
        return y

    if torch.is_grad_enabled() and torch.compiler.is_compiling():
        return linear(checkpointed(function))
    if not torch.is_grad_enabled() or is_small(*arguments):
        return linear(function(*arguments))
    return checkpointed(lambda *parts: linear(function(*parts)))


# least input columns at which oneDNN's product was no slower than MKL's
MIN_WIDTH, MIN_HEAD_WIDTH = 256, 64
_standard = False  # within standard_kernels


@contextlib.contextmanager
def standard_kernels() -> Iterator[None]:
    """Within the block, layers and loss on a CPU call torch's functions, as on a GPU, and not this module's kernels."""
    global _standard
    before, _standard = _standard, True
    try:
        yield
    finally:
        _standard = before


def use_cpu_kernels(x: Tensor) -> bool:
    """Whether x runs on this module's kernels: CPU, float32, no autocast, no torch.compile."""
    return (
        x.device.type == "cpu"
        and not _standard
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def use_onednn(x: Tensor, min_width: int = MIN_WIDTH) -> bool:
    """Whether x (..., C) is multiplied by oneDNN: CPU kernels apply and C >= min_width."""
    return use_cpu_kernels(x) and x.shape[-1] >= min_width and onednn_available()


def onednn_available() -> bool:
    """Whether this torch has oneDNN's linear operator."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_matmul(x: Tensor, weight_MC: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Compute x (..., C) @ weight_MC.T + bias_M by oneDNN, without gradients. torch.compile calls the same operator."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_MC, bias_M, "none", [], "")
    return out


def _linear_gradients(ctx: Any, grad: Tensor, x: Tensor, weight_MC: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of input, weight and bias that autograd needs; None for the others."""
    need_x, need_weight, need_bias = ctx.needs_input_grad
    grad_NM = grad.reshape(-1, grad.shape[-1])
    grad_x = (grad_NM @ weight_MC).view(x.shape) if need_x else None
    grad_weight = grad_NM.T @ x.reshape(-1, x.shape[-1]) if need_weight else None
    return grad_x, grad_weight, grad_NM.sum(0) if need_bias else None


class _Linear(torch.autograd.Function):
    """F.linear with the forward product by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_MC: Tensor, bias_M: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_MC)
        return onednn_matmul(x, weight_MC, bias_M)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _linear_gradients(ctx, grad_outputs[0], *ctx.saved_tensors)


class _GeluLinear(torch.autograd.Function):
    """F.linear(F.gelu(x)). Where x is large, saves x only and recomputes the GELU in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_MC: Tensor, bias_M: Tensor) -> Tensor:
        hidden = F.gelu(x, approximate="tanh")
        ctx.save_for_backward(x, weight_MC, *([hidden] if is_small(x) else []))
        return F.linear(hidden, weight_MC, bias_M)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_MC, *saved = ctx.saved_tensors
        hidden = saved.pop() if saved else F.gelu(x, approximate="tanh")
        grad_hidden, grad_weight, grad_bias = _linear_gradients(ctx, grad_outputs[0], hidden, weight_MC)
        del hidden
        if grad_hidden is None:
            return None, grad_weight, grad_bias
        return torch.ops.aten.gelu_backward(grad_hidden, x, approximate="tanh"), grad_weight, grad_bias


def linear(x: Tensor, weight_MC: Tensor, bias_M: Tensor) -> Tensor:
    """Compute x (..., C) @ weight_MC.T + bias_M -> (..., M)."""
    if not use_onednn(x):
        return F.linear(x, weight_MC, bias_M)
    y: Tensor = _Linear.apply(x, weight_MC, bias_M)
    return y


def recompute_gelu(x: Tensor) -> bool:
    """Whether gelu_linear applies to x, which recomputes a large GELU in backward instead of saving it."""
    return use_cpu_kernels(x) and torch.is_grad_enabled()


def gelu_linear(x: Tensor, weight_MC: Tensor, bias_M: Tensor) -> Tensor:
    """Compute gelu(x) @ weight_MC.T + bias_M with the tanh GELU. Saves x, and a small GELU. Shapes as in `linear`."""
    y: Tensor = _GeluLinear.apply(x, weight_MC, bias_M)
    return y
