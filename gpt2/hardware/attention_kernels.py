"""Only fused attention: a T x T matrix of scores is never written out quietly.

A context manager leaves torch no kernel but the target's fused ones, so that a call which none of them takes
raises; a check before training names the remedy.
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

# Of the largest deviation from float64, as a share of the largest value. Measured with torch's CPU kernel: 9e-7 in
# float32, 6e-3 in bfloat16; GPUs may use TF32 for float32. A wrong mask or scale is off by tenths.
TOLERANCE = {"float32": 1e-2, "bfloat16": 5e-2}


def attention_context(resolved: ResolvedTarget, dropout: float = 0.0) -> AbstractContextManager[Any]:
    """Restrict scaled_dot_product_attention to the target's fused kernels, in the row's order.

    To be held while the model is compiled as well as while it runs. torch's fused CPU kernel takes no dropout: on a
    CPU, and with dropout above 0, the T x T path is allowed.
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
    """One small forward and backward as the model will make them; the target with the kernel that took them.

    TargetError where no fused kernel takes the call, or where its result is not attention's (compared with the
    definition in float64, without dropout). Draws from a generator of its own.
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
            f"{resolved.device_name}: no fused attention kernel takes {heads} heads of {head_size} in "
            f"{resolved.dtype}, and the T x T math path is not taken quietly; {_remedy(resolved)} (torch: {reason})"
        ) from error
    if not dropout:
        _compare(resolved, kernel, (y, gradient), _define(qkv_BTC.to(dtype).double(), heads))
    note = resolved.note
    if kernel == "math":
        told = (
            "attention writes out T x T scores: torch's fused CPU kernel takes no CONFIG_GPT2_DROPOUT above 0"
        )
        note = f"{note}; {told}" if note else told
    return dataclasses.replace(resolved, attention_backend=kernel, note=note)


def _attend(qkv_BTC: Tensor, heads: int, dropout: float) -> tuple[Tensor, Tensor, str]:
    """Causal attention, the gradient of the sum of its squares, and the kernel that ran."""
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


def _define(qkv_BTC: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The same from the definition, on the CPU."""
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
    """Three views (B, H, T, D) of one projection, strided as the model's are."""
    return [part.unflatten(2, (heads, -1)).transpose(1, 2) for part in qkv_BTC.chunk(3, dim=2)]


def _compare(
    resolved: ResolvedTarget, kernel: str, got: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]
) -> None:
    for what, mine, other in zip(("result", "gradient"), got, right, strict=True):
        error = float((mine.cpu().double() - other).abs().max() / other.abs().max())
        limit = TOLERANCE[resolved.dtype]
        if not error <= limit:  # true for NaN as well
            raise TargetError(
                f"{resolved.device_name}: the {kernel} attention kernel's {what} is off by {error:.1%} "
                f"in {resolved.dtype}, right: at most {limit:.0%}; remedy: another version of torch or of the driver"
            )


def _remedy(resolved: ResolvedTarget) -> str:
    needs = resolved.target.environment
    missing = " ".join(f"{name}={value}" for name, value in needs.items() if os.environ.get(name) != value)
    if missing:
        return f"export {missing} before the start"
    if resolved.device == "cpu":
        return "a newer torch has a fused CPU kernel"
    if resolved.target.kind == "rocm":
        return "install a ROCm build of torch that has AOTriton kernels for this card"
    if resolved.dtype == "float32":
        return "set CONFIG_DTYPE_AUTO=y: most fused kernels take bfloat16 only"
    return "install a build of torch for this card, or choose a model whose heads have a size of 64 to 128"


@contextmanager
def _reasons(reasons: list[str]) -> Iterator[None]:
    """Collect what torch says about kernels that it passes over, instead of printing it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            told = [str(warning.message).partition("(Triggered internally")[0].strip() for warning in caught]
            reasons += [reason for reason in told if not reason.endswith("because:")]


def prepare_device(config: TargetConfig, model: ModelConfig) -> ResolvedTarget:
    """The target with its kernels tried on the model's shapes, and this process set up to train there.

    TargetError where the target is not this machine or has no kernel for them.
    """
    import torch

    heads, head_size = model.heads, model.width // model.heads
    resolved = check_attention(resolve(config), heads, head_size, model.block_size, model.dropout)
    if resolved.device == "cpu":
        torch.set_num_threads(cpu_threads(config.cpu_threads))
    else:
        torch.set_float32_matmul_precision("high")
    return resolved
