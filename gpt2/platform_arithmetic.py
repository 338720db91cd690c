"""Put a trained model on a platform: number format, quantised weights (torchao), or emulated foreign arithmetic."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpt2.cpu_linear import standard_kernels
from gpt2.initial_weights import derive_seed
from gpt2.platforms import Platform, PlatformError
from gpt2.training_step import autocast
from gpt2.transformer import GPT2

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
    with standard_kernels(), foreign:  # products of the CPU kernels are not torch functions
        yield


Autocast = Callable[[], AbstractContextManager[Any]]


def on_platform(model: GPT2, platform: Platform, device: str, home: str = "float32") -> tuple[GPT2, Autocast]:
    """Return the model on a platform, and the context of its forward passes. The model itself is unchanged.

    home: number format of training, which foreign arithmetic alters. Quantised weights are used in float32. The head
    shares its weights with the token embedding and stays in float32. PlatformError for what this machine or this model
    does not have.
    """
    require(platform, device)
    if platform.bits:
        return quantised(model, platform), standard_kernels  # torch's layers know quantised weights
    if platform.kind:
        foreign = ForeignArithmetic(platform)
        return model, lambda: _foreign(foreign, autocast(device, home))
    if platform.name == "tf32":
        return model, _tf32
    return model, lambda: autocast(device, platform.format)


@contextlib.contextmanager
def _foreign(foreign: ForeignArithmetic, home: AbstractContextManager[Any]) -> Iterator[None]:
    with home, foreign_arithmetic(foreign):
        yield


def require(platform: Platform, device: str) -> None:
    """PlatformError if the device lacks the number format."""
    if platform.name == "tf32" and not (device.startswith("cuda") and torch.version.cuda):
        raise PlatformError("tf32 needs an NVIDIA GPU; fix: leave it out of PLATFORM here")


def quantised(model: GPT2, platform: Platform) -> GPT2:
    """Return a copy of the model whose linear layers are quantised by torchao."""
    for name in ("torchao", "torch.utils._pytree"):  # warn of kernels and of interfaces that are not used
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from torchao import quantization as torchao
    except ImportError:
        raise PlatformError(
            f"{platform.name} needs torchao, which is not installed; fix: pip install torchao==0.18.0"
        ) from None
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and platform.group and module.in_features % platform.group:
            raise PlatformError(
                f"{platform.name}: groups of {platform.group} do not divide the {module.in_features} inputs of {name}; "
                f"fix: use a group size that divides them, or int{platform.bits}:row"
            )
    config: Any
    if platform.dynamic:
        config = torchao.Int8DynamicActivationInt8WeightConfig()
    else:
        granularity = torchao.PerGroup(platform.group) if platform.group else torchao.PerAxis(0)
        dtype = getattr(torch, f"int{platform.bits}")
        config = torchao.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)
    copied = copy.deepcopy(model)
    torchao.quantize_(copied, config, filter_fn=lambda module, name: isinstance(module, nn.Linear))
    return copied


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
