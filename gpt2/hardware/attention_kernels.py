"""Restrict attention to fused kernels, so that no call silently computes a T x T matrix of scores.

In the context, a call that no fused kernel supports raises. A check before training names the fix.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from gpt2.hardware.cpu import cpu_threads
from gpt2.hardware.gpu_specs import TargetError
from gpt2.hardware.resolve import ResolvedTarget, resolve

if TYPE_CHECKING:
    from torch import Tensor

    from gpt2.config.config import ModelConfig, TargetConfig

# Largest deviation from float64, relative to the largest value. torch's CPU kernel has 9e-7 in float32 and 6e-3 in
# bfloat16; GPUs may use TF32 for float32. A wrong mask or scale gives tenths.
TOLERANCE = {"float32": 1e-2, "bfloat16": 5e-2}


def attention_context(resolved: ResolvedTarget, dropout: float = 0.0) -> AbstractContextManager[Any]:
    """Restrict scaled_dot_product_attention to the target's fused kernels, in the row's order.

    Enter it for compiling and for running. torch's fused CPU kernel supports no dropout; on a CPU with dropout above
    0 the T x T path is allowed.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    allowed = [kernels[name] for name in resolved.target.attention]
    if resolved.device == "cpu" and dropout > 0:
        allowed.append(SDPBackend.MATH)
    return sdpa_kernel(allowed, set_priority=True)


def check_attention(
    resolved: ResolvedTarget, heads: int, head_size: int, block_size: int = 64, dropout: float = 0.0
) -> ResolvedTarget:
    """Run a small forward and backward with the model's shapes and return the target with the kernel that ran.

    TargetError where no fused kernel supports the call, or where the result differs from the definition in float64
    (compared without dropout). Uses a separate random generator.
    """
    import torch
    import torch.nn.functional as F

    dtype = getattr(torch, resolved.dtype)
    draw = torch.Generator().manual_seed(0)
    qkv_BTC = torch.randn(
        1, min(block_size, 64), 3 * heads * head_size, generator=draw, dtype=torch.float64
    ).to(dtype)

    def fused(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, dropout_p=dropout, is_causal=True)

    reasons: list[str] = []
    try:
        with attention_context(resolved, dropout), _reasons(reasons):
            y, gradient, name = _attend(qkv_BTC.to(resolved.device, dtype), heads, fused)
    except RuntimeError as error:
        reason = next(iter(reasons), str(error).strip().splitlines()[0])
        raise TargetError(
            f"{resolved.device_name}: no fused attention kernel supports {heads} heads of {head_size} in "
            f"{resolved.dtype} (torch: {reason}); the T x T path is disabled; {_fix(resolved)}"
        ) from error
    kernels = [kernel for kernel in ("flash", "efficient", "cudnn") if f"{kernel}attention" in name.lower()]
    kernel = kernels[0] if kernels else "math"
    if not dropout:
        exact_y, exact_gradient, _ = _attend(qkv_BTC.double(), heads, _definition)
        _compare(resolved, f"{kernel} attention kernel's result", y, exact_y)
        _compare(resolved, f"{kernel} attention kernel's gradient", gradient, exact_gradient)
    notes = [resolved.note] if resolved.note else []
    if kernel == "math":
        notes.append(
            "attention stores T x T scores: torch's fused CPU kernel supports no CONFIG_GPT2_DROPOUT above 0"
        )
    return dataclasses.replace(resolved, attention_backend=kernel, note="; ".join(notes) or None)


def _attend(qkv_BTC: Tensor, heads: int, attention: Callable[..., Tensor]) -> tuple[Tensor, Tensor, str]:
    """Compute attention on views of one projection, as in the model.

    Returns the result, the gradient of half its squared sum, and autograd's name of the operation.
    """
    qkv_BTC = qkv_BTC.detach().requires_grad_()
    views = [part.unflatten(2, (heads, -1)).transpose(1, 2) for part in qkv_BTC.chunk(3, dim=2)]
    y_BHTD = attention(*views)
    name = y_BHTD.grad_fn.name() if y_BHTD.grad_fn else ""
    (y_BHTD.float().square().sum() / 2).backward()
    assert qkv_BTC.grad is not None
    return y_BHTD.detach(), qkv_BTC.grad, name


def _definition(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    scores_BHTT = q_BHTD @ k_BHTD.transpose(2, 3) / q_BHTD.shape[3] ** 0.5
    later_TT = scores_BHTT.new_ones(scores_BHTT.shape[2:]).triu(1).bool()
    y_BHTD: Tensor = scores_BHTT.masked_fill(later_TT, float("-inf")).softmax(3) @ v_BHTD
    return y_BHTD


def _compare(resolved: ResolvedTarget, what: str, found: Tensor, exact: Tensor) -> None:
    error = float((found.cpu().double() - exact).abs().max() / exact.abs().max())
    limit = TOLERANCE[resolved.dtype]
    if not error <= limit:  # true for NaN as well
        raise TargetError(
            f"{resolved.device_name}: the {what} differs by {error:.1%} from the definition in {resolved.dtype}; the "
            f"limit is {limit:.0%}; fix: use another version of torch or of the driver"
        )


def _fix(resolved: ResolvedTarget) -> str:
    needs = resolved.target.environment
    missing = " ".join(f"{name}={value}" for name, value in needs.items() if os.environ.get(name) != value)
    if missing:
        return f"fix: export {missing}"
    if resolved.device == "cpu":
        return "fix: install a newer torch, which has a fused CPU kernel"
    if resolved.target.kind == "rocm":
        return "fix: install a ROCm build of torch that has AOTriton kernels for this card"
    if resolved.dtype == "float32":
        return "fix: set CONFIG_DTYPE_AUTO=y, since most fused kernels support bfloat16 only"
    return "fix: install a build of torch for this card, or choose a model with a head size of 64 to 128"


@contextmanager
def _reasons(reasons: list[str]) -> Iterator[None]:
    """Collect torch's warnings about skipped kernels instead of printing them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            messages = [str(one.message).partition("(Triggered internally")[0].strip() for one in caught]
            reasons += [message for message in messages if not message.endswith("because:")]


def prepare_device(config: TargetConfig, model: ModelConfig) -> ResolvedTarget:
    """Resolve the target, check its kernels with the model's shapes, and set up this process for training.

    TargetError where this machine is not the target or has no kernel for the shapes.
    """
    import torch

    heads, head_size = model.heads, model.width // model.heads
    resolved = check_attention(resolve(config), heads, head_size, model.block_size, model.dropout)
    if resolved.device == "cpu":
        torch.set_num_threads(cpu_threads(config.cpu_threads))
    else:
        torch.set_float32_matmul_precision("high")
    return resolved
