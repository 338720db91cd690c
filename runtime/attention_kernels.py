"""Restrict attention to the target's kernels, so that no call silently computes a T x T matrix of scores.

In the context, a call that no fused kernel supports raises. A check before training names the fix.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from runtime import ranks
from runtime.detected_hardware import cpu_threads
from runtime.errors import device_fault, out_of_memory
from runtime.gpu_specs import TargetError
from runtime.resolved_target import ResolvedTarget, resolve
from runtime.torch_devices import list_torch_devices

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.settings import ModelConfig, TargetConfig

# Largest deviation from float64, relative to the largest value. torch's CPU kernel has 9e-7 in float32 and 6e-3 in
# bfloat16; GPUs may use TF32 for float32. A wrong mask or scale gives tenths.
TOLERANCE = {"float32": 1e-2, "bfloat16": 5e-2}
LONGEST_CHECK = 2048  # tokens; the definition stores several matrices of T x T float32 numbers for each head
# Up to this version cuDNN is wrong for lengths that 128 does not divide (pytorch/pytorch issue 169849).
LAST_WRONG_CUDNN = 91500
KERNEL = re.compile(
    r"_scaled_dot_product_(?:(flash|efficient|cudnn)_attention|attention_(math))|npu_(fusion)_attention"
)
FUSED = ("flash", "efficient", "cudnn", "fusion")


def kernel_order(resolved: ResolvedTarget) -> list[str]:
    """Return the row's fused kernels in the order of preference. A cuDNN that may be wrong is last."""
    import torch

    wrong = (torch.backends.cudnn.version() or 0) <= LAST_WRONG_CUDNN
    return sorted(resolved.target.attention, key=lambda kernel: kernel == "cudnn" and wrong)


@functools.cache
def set_default_order(device: str) -> None:
    """Let torch set its default order of kernels for a GPU, outside of any context.

    torch does so at the first choice of a kernel in a process. Inside a context it would replace the order of the
    context (priority_order in torch's sdp_utils.cpp).
    """
    import torch

    q_BHTD = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16).to(device)
    torch._fused_sdp_choice(q_BHTD, q_BHTD, q_BHTD, is_causal=True)


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
        "fusion": SDPBackend.OVERRIDEABLE,  # of a device outside torch's own
    }
    allowed = [kernels[name] for name in kernel_order(resolved)]
    if resolved.device_type == "cuda":
        set_default_order(resolved.device)
    elif resolved.device == "cpu" and dropout > 0:
        allowed.append(SDPBackend.MATH)
    return sdpa_kernel(allowed, set_priority=True)


def check_attention(
    resolved: ResolvedTarget, heads: int, head_size: int, block_size: int = 64, dropout: float = 0.0
) -> ResolvedTarget:
    """Run forward and backward with the model's shapes and return the target with the kernel that ran.

    TargetError where no fused kernel supports the call, or where the result differs from the definition (compared
    without dropout). The definition is computed in float64 on the CPU for one sequence of up to 64 tokens. A card
    also runs two sequences of 200 tokens, which 128 does not divide, and two of the model's length, and computes their
    definition in float32. Uses a separate random generator. A backend outside torch may take the T x T path without an
    error where its fused kernel does not support a call; that is refused here.
    """
    import torch

    dtype, device = getattr(torch, resolved.dtype), resolved.device
    draw = torch.Generator().manual_seed(0)
    sizes = [(1, 64, "cpu", torch.float64)]
    if device != "cpu":
        sizes += [(2, 200, device, torch.float32), (2, LONGEST_CHECK, device, torch.float32)]
    for B, longest, exact_device, exact_dtype in sizes:
        shape = (B, min(block_size, longest), 3 * heads * head_size)
        qkv_BTC = torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
        found, kernel = _attend_fused(resolved, qkv_BTC, heads, dropout)
        if kernel == "math" and resolved.device_type not in ("cpu", "cuda"):
            raise _no_kernel(resolved, qkv_BTC, heads, "it took the T x T path")
        if not dropout:
            exact, _ = _attend(qkv_BTC.to(exact_device, exact_dtype), heads, _definition)
            _compare(resolved, f"{kernel} attention kernel's {{}} for {B} x {shape[1]} tokens", found, exact)
    notes = [resolved.note] if resolved.note else []
    if kernel == "math" and device == "cpu":
        notes.append(
            "attention stores T x T scores: torch's fused CPU kernel supports no CONFIG_GPT2_DROPOUT above 0"
        )
    return dataclasses.replace(resolved, attention_backend=kernel, note="; ".join(notes) or None)


def _attend_fused(
    resolved: ResolvedTarget, qkv_BTC: Tensor, heads: int, dropout: float
) -> tuple[list[Tensor], str]:
    """Run a fused kernel on the device. Return result and gradient as in `_attend`, and the name of the kernel."""
    import torch.nn.functional as F

    def fused(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, dropout_p=dropout, is_causal=True)

    reasons: list[str] = []
    try:
        with attention_context(resolved, dropout), _reasons(reasons):
            found, operation = _attend(qkv_BTC.to(resolved.device), heads, fused)
    except RuntimeError as error:
        if out_of_memory(error) or device_fault(error):
            raise
        reason = next(iter(reasons), str(error).strip().splitlines()[0])
        raise _no_kernel(resolved, qkv_BTC, heads, reason) from error
    kernels = [name for name in FUSED if f"{name}attention" in operation.lower()]
    return found, kernels[0] if kernels else "math"


def _no_kernel(resolved: ResolvedTarget, qkv_BTC: Tensor, heads: int, reason: str) -> TargetError:
    heads_text = f"{heads} heads of {qkv_BTC.shape[2] // (3 * heads)}"
    return TargetError(
        f"{resolved.device_name}: no fused attention kernel supports {heads_text} in {resolved.dtype} (torch: "
        f"{reason}); the T x T path is disabled; {_fix(resolved)}"
    )


def _attend(qkv_BTC: Tensor, heads: int, attention: Callable[..., Tensor]) -> tuple[list[Tensor], str]:
    """Compute attention on views of one projection, as in the model.

    Returns the result with the gradient of half its squared sum, and autograd's name of the operation.
    """
    qkv_BTC = qkv_BTC.detach().requires_grad_()
    views = [part.unflatten(2, (heads, -1)).transpose(1, 2) for part in qkv_BTC.chunk(3, dim=2)]
    y_BHTD = attention(*views)
    name = y_BHTD.grad_fn.name() if y_BHTD.grad_fn else ""
    (y_BHTD.float().square().sum() / 2).backward()
    assert qkv_BTC.grad is not None
    return [y_BHTD.detach(), qkv_BTC.grad], name


def _definition(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    scores_BHTT = q_BHTD @ k_BHTD.transpose(2, 3) / q_BHTD.shape[3] ** 0.5
    later_TT = scores_BHTT.new_ones(scores_BHTT.shape[2:]).triu(1).bool()
    y_BHTD: Tensor = scores_BHTT.masked_fill(later_TT, float("-inf")).softmax(3) @ v_BHTD
    return y_BHTD


def _compare(resolved: ResolvedTarget, what: str, found: list[Tensor], exact: list[Tensor]) -> None:
    limit = TOLERANCE[resolved.dtype]
    for name, value, reference in zip(("result", "gradient"), found, exact, strict=True):
        expected = reference.cpu().double()
        error = float((value.cpu().double() - expected).abs().max() / expected.abs().max())
        if not error <= limit:  # true for NaN as well
            raise TargetError(
                f"{resolved.device_name}: the {what.format(name)} differs by {error:.1%} from the definition in "
                f"{resolved.dtype}; the limit is {limit:.0%}; fix: use another version of torch or of the driver"
            )


@contextmanager
def observe_kernels(observed: set[str]) -> Iterator[None]:
    """Add the attention kernels that torch's profiler sees in the block to `observed`."""
    from torch.autograd.profiler import profile  # torch.profiler would load torch._dynamo

    with profile(acc_events=True) as profiler:  # each operation has a CPU event
        yield
    observed |= kernels_of(event.key for event in profiler.key_averages())


@contextmanager
def record_kernels(target: dict[str, Any], note: Callable[[str], None]) -> Iterator[None]:
    """Store the attention kernels of the block in the record's `target`; note where the check had run another."""
    kernels: set[str] = set()
    with observe_kernels(kernels):
        yield
    observed = " and ".join(sorted(kernels)) or "none"
    if observed != target["attention_backend"]:
        note(f"attention ran {observed} in training; the check before it ran {target['attention_backend']}")
    target["attention_backend"] = observed


def kernels_of(operations: Iterable[str]) -> set[str]:
    """Return the attention kernels among names of torch operations."""
    found = (KERNEL.search(name) for name in operations)
    return {match[match.lastindex or 0] for match in found if match}


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

    if config.deterministic:  # the parent process has set the environment; CONFIG_GPT2_DROPOUT remains
        from referee.numerics.seed import seed_all

        seed_all(mode=True, rm_dropout=False)
    heads, head_size = model.heads, model.width // model.heads
    resolved = resolve(config, devices=list_torch_devices())
    if resolved.device != "cpu":
        module = torch.get_device_module(resolved.device)
        module.set_device(resolved.device)  # the default for torch calls that name no device
    resolved = check_attention(resolved, heads, head_size, model.block_size, model.dropout)
    if resolved.device == "cpu":
        here = 1 if config.cpu_threads else ranks.local("LOCAL_WORLD_SIZE", config.ranks)
        torch.set_num_threads(max(1, cpu_threads(config.cpu_threads) // here))
    else:
        module.empty_cache()  # of the check
        if resolved.device_type == "cuda":  # TF32
            torch.set_float32_matmul_precision("high")
    return resolved
