"""Restrict attention to fused kernels, so that no call silently computes a T x T matrix of scores.

In the context, a call that no fused kernel supports raises. A check before training names the fix.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator
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

    dtype = getattr(torch, resolved.dtype)
    tokens = min(block_size, 64)
    draw = torch.Generator().manual_seed(0)
    qkv_BTC = torch.randn(1, tokens, 3 * heads * head_size, generator=draw, dtype=torch.float64)
    reasons: list[str] = []
    try:
        with attention_context(resolved, dropout), _reasons(reasons):
            y, gradient, kernel = _attend(qkv_BTC.to(resolved.device, dtype), heads, dropout)
    except RuntimeError as error:
        reason = next(iter(reasons), str(error).strip().splitlines()[0])
        raise TargetError(
            f"{resolved.device_name}: no fused attention kernel supports {heads} heads of {head_size} in "
            f"{resolved.dtype} (torch: {reason}); the T x T path is disabled; {_fix(resolved)}"
        ) from error
    if not dropout:
        _compare(resolved, kernel, (y, gradient), _reference(qkv_BTC.to(dtype).double(), heads))
    note = resolved.note
    if kernel == "math":
        quadratic = (
            "attention stores T x T scores: torch's fused CPU kernel supports no CONFIG_GPT2_DROPOUT above 0"
        )
        note = f"{note}; {quadratic}" if note else quadratic
    return dataclasses.replace(resolved, attention_backend=kernel, note=note)


def _attend(qkv_BTC: Tensor, heads: int, dropout: float) -> tuple[Tensor, Tensor, str]:
    """Return causal attention, the gradient of half its squared sum, and the kernel that ran."""
    import torch.nn.functional as F

    qkv_BTC = qkv_BTC.detach().requires_grad_()
    q_BHTD, k_BHTD, v_BHTD = _split(qkv_BTC, heads)
    y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, dropout_p=dropout, is_causal=True)
    name = y_BHTD.grad_fn.name() if y_BHTD.grad_fn else ""
    kernel = next(
        (kernel for kernel in ("flash", "efficient", "cudnn") if f"{kernel}attention" in name.lower()), "math"
    )
    (y_BHTD.float().square().sum() / 2).backward()
    assert qkv_BTC.grad is not None
    return y_BHTD.detach(), qkv_BTC.grad, kernel


def _reference(qkv_BTC: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the same from the definition, on the CPU."""
    import torch

    qkv_BTC = qkv_BTC.detach().requires_grad_()
    q_BHTD, k_BHTD, v_BHTD = _split(qkv_BTC, heads)
    scores = q_BHTD @ k_BHTD.transpose(2, 3) / q_BHTD.shape[3] ** 0.5
    later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    y_BHTD = scores.masked_fill(later, float("-inf")).softmax(3) @ v_BHTD
    (y_BHTD.square().sum() / 2).backward()
    assert qkv_BTC.grad is not None
    return y_BHTD.detach(), qkv_BTC.grad


def _split(qkv_BTC: Tensor, heads: int) -> list[Tensor]:
    """Return three views (B, H, T, D) of one projection with the model's strides."""
    return [part.unflatten(2, (heads, -1)).transpose(1, 2) for part in qkv_BTC.chunk(3, dim=2)]


def _compare(
    resolved: ResolvedTarget, kernel: str, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]
) -> None:
    for name, value, reference in zip(("result", "gradient"), found, expected, strict=True):
        error = float((value.cpu().double() - reference).abs().max() / reference.abs().max())
        limit = TOLERANCE[resolved.dtype]
        if not error <= limit:  # true for NaN as well
            raise TargetError(
                f"{resolved.device_name}: the {kernel} attention kernel's {name} differs by {error:.1%} from the "
                f"definition in {resolved.dtype}; the limit is {limit:.0%}; fix: use another version of torch or of "
                "the driver"
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
