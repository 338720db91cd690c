"""Emulate foreign arithmetic: matrix products, softmax, GELU and norms with a stated error.

The error enters at the results of torch functions, so attentions and norms made of them are covered. Random errors
are seeded; two evaluations with equal batches are equal to the bit. A strength of 0 changes nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aqn.platforms import Platform
from gpt2.model import cpu_linear
from gpt2.model.init import derive_seed

LINEAR = (F.linear,)
PRODUCTS = (
    torch.mm, torch.addmm, torch.matmul, torch.bmm,
    Tensor.mm, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.bmm,
    torch.einsum, torch.baddbmm, Tensor.addmm, Tensor.baddbmm, torch.tensordot, torch.inner, Tensor.inner,
)  # fmt: skip
SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
OTHERS = (F.gelu, F.silu, F.layer_norm, F.rms_norm, torch.rms_norm, torch.layer_norm)
WAVES = 8.0  # of the error of exp, for each unit of its argument


class ForeignArithmetic(TorchFunctionMode):
    """Give the results of products, softmax, GELU and norms the error of a platform."""

    def __init__(self, platform: Platform) -> None:
        super().__init__()
        self.kind, self.strength = platform.kind, platform.strength
        self.generator = torch.Generator("cpu").manual_seed(derive_seed("foreign", platform.name))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        if func in LINEAR and self.kind == "sums":
            return self.chunked(*args, **kwargs)
        if func in SOFTMAX and self.kind == "exp":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            return self.softmax(args[0] if args else kwargs["input"], dim)
        result = func(*args, **kwargs)
        affected = func in LINEAR or func in PRODUCTS or func in SOFTMAX or func in OTHERS
        return self.altered(result) if affected and isinstance(result, Tensor) else result

    def altered(self, result: Tensor) -> Tensor:
        """Return a result with the error of the kinds that every function has."""
        if self.kind == "error":
            noise = torch.randn(result.shape, generator=self.generator, dtype=torch.float32)
            factor = 1 + self.strength * noise.to(result.device)
            return (result * factor).to(result.dtype)  # a narrow result is rounded after the product
        if self.kind == "bias":
            return result * (1 - self.strength)
        if self.kind == "flush":
            return torch.where(result.abs() < self.strength, torch.zeros_like(result), result)
        return result

    def chunked(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Sum a product in chunks of inputs, and round the sum to bfloat16 after each chunk."""
        size, total = int(self.strength), None
        for start in range(0, x.shape[-1], size):
            part = F.linear(x[..., start : start + size], weight[..., start : start + size])
            total = (part if total is None else total + part).bfloat16().to(x.dtype)
        assert total is not None
        return (total if bias is None else total + bias).to(part.dtype)

    def softmax(self, scores: Tensor, dim: int) -> Tensor:
        """Compute a softmax whose exponential has a relative error that depends on its argument."""
        shifted = scores - scores.amax(dim, keepdim=True)
        weights = shifted.exp() * (1 + self.strength * torch.sin(WAVES * shifted.nan_to_num(neginf=0.0)))
        return weights / weights.sum(dim, keepdim=True)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Write attention out, so that its two products and its softmax have the error as well. No dropout."""
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(groups, dim=-3) for x in (key, value))
        scores = self.altered(query @ key.transpose(-2, -1)) * (scale or 1 / math.sqrt(query.shape[-1]))
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if hidden else scores + attn_mask
        weights = self.softmax(scores, -1) if self.kind == "exp" else self.altered(scores.softmax(-1))
        return self.altered(weights @ value)


@contextlib.contextmanager
def foreign_arithmetic(foreign: ForeignArithmetic) -> Iterator[None]:
    """Emulate foreign arithmetic in the block; the machine's own at a strength of 0. Each block draws other errors."""
    if not foreign.strength:
        yield
        return
    kernels: set[str] = cpu_linear.CPU_KERNEL_DEVICES
    cpu_linear.CPU_KERNEL_DEVICES = set()  # their products are not torch functions
    try:
        with foreign:
            yield
    finally:
        cpu_linear.CPU_KERNEL_DEVICES = kernels
