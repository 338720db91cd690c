"""Check the fused attention kernels of a device: which one runs, its error, its repeatability and its speed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.card_checks import CardCheck, CheckedDevice, judge, not_run
from bench.runner import BenchError, BenchWorker
from gpt2.clocks import device_synchroniser
from runtime import attention_kernels
from runtime.attention_kernels import TOLERANCE
from runtime.resolved_target import ResolvedTarget

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Shape = tuple[int, int, int, int]  # sequences, heads, tokens, head size
# A micro-batch of training, the same with the head size of RALEARN:score, and a length that 128 does not divide.
SHAPES: dict[bool, tuple[Shape, ...]] = {
    False: ((64, 12, 1024, 64), (64, 12, 1024, 128), (37, 12, 200, 64)),
    True: ((4, 12, 256, 64), (4, 12, 256, 128), (3, 12, 200, 64)),
}
CALLS, REPEATS = 10, 3  # timed; compared to the bit
EXACT_SEQUENCES = 2  # whose float32 scores are stored
SLOWER = 1.1  # times the fastest kernel's time
LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class KernelResult:
    """errors: of result and gradient, relative to the largest value. repeats: whether their bits repeat."""

    milliseconds: float
    errors: tuple[float, float]
    repeats: tuple[bool, bool]


def kernel_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Check the order first, in a new process: torch sets its own order at the first call of a process."""
    resolved = card.resolved
    with BenchWorker("attention kernels") as worker:
        order, found = worker.call(selected_kernels, resolved, limit_seconds=LIMIT_SECONDS)
        half_only = resolved.dtype == "float32" and resolved.device_type == "cuda"
        names = [name for name in order if not half_only or name == "efficient"]
        expected = f"{names[0]} at the first and the second call of a process (of {', '.join(order)})"
        yield judge("kernels: order", expected, ", ".join(found), set(found) == {names[0]})
        shapes = SHAPES[card.on_cpu]
        milliseconds: dict[str, float] = {}
        for shape in shapes:
            for kernel in KERNELS:
                name = f"kernels: {kernel}, {' x '.join(map(str, shape))}"
                limit = TOLERANCE[resolved.dtype]
                expected = f"error at most {limit:g}, result repeats to the bit"
                if kernel not in names:
                    yield not_run(
                        name, expected, f"not a kernel of {resolved.target.name} in {resolved.dtype}"
                    )
                    continue
                try:
                    result = worker.call(measure_kernel, resolved, kernel, shape, limit_seconds=LIMIT_SECONDS)
                except BenchError as error:
                    yield judge(name, expected, f"{error}", False)
                    continue
                good = all(error <= limit for error in result.errors) and result.repeats[0]
                yield judge(name, expected, describe(result), good)
                if shape == shapes[0]:
                    milliseconds[kernel] = result.milliseconds
    yield order_check(names[0], milliseconds)


def describe(result: KernelResult) -> str:
    yes, no = "repeats", "does NOT repeat"
    texts = [
        f"{part}: error {error:.1e}, {yes if repeats else no} to the bit"
        for part, error, repeats in zip(("result", "gradient"), result.errors, result.repeats, strict=True)
    ]
    return f"{result.milliseconds:.2f} ms forward and backward; {'; '.join(texts)}"


def order_check(first: str, milliseconds: dict[str, float]) -> CardCheck:
    """Compare the preferred kernel's time with the fastest one's."""
    name, expected = "kernels: speed", f"{first} takes at most {SLOWER:g} times the fastest kernel's time"
    if len(milliseconds) < 2 or first not in milliseconds:
        return not_run(name, expected, f"kernels measured: {', '.join(milliseconds) or 'none'}")
    texts = ", ".join(f"{kernel} {ms:.2f} ms" for kernel, ms in milliseconds.items())
    return judge(name, expected, texts, milliseconds[first] <= SLOWER * min(milliseconds.values()))


# ---- in a worker


def selected_kernels(resolved: ResolvedTarget) -> tuple[list[str], list[str]]:
    """Return the order of preference, and the kernel that ran in each of two calls. Call it first in a process."""
    order = attention_kernels.kernel_order(resolved)
    backends = [attention_kernels.check_attention(resolved, 12, 64).attention_backend for _ in range(2)]
    return order, backends


def measure_kernel(resolved: ResolvedTarget, kernel: str, shape: Shape) -> KernelResult:
    """Run one kernel forward and backward on views of one projection, as in the model."""
    B, H, T, D = shape
    draw = torch.Generator().manual_seed(0)
    dtype, device = getattr(torch, resolved.dtype), resolved.device
    x = torch.randn(B, T, 3 * H * D, generator=draw).to(device, dtype)
    grad = torch.randn(B, T, H * D, generator=draw).to(device, dtype)
    with sdpa_kernel(SDPBackend.MATH):
        some = slice(0, EXACT_SEQUENCES)
        exact = attend(x[some].float(), grad[some].float(), H)
    with sdpa_kernel(KERNELS[kernel]):
        first = attend(x, grad, H)
        others = [attend(x, grad, H) for _ in range(REPEATS - 1)]
        repeats = [all(torch.equal(a, b) for b in rest) for a, *rest in zip(first, *others, strict=True)]
        synchronise = device_synchroniser(device)
        synchronise()
        began = time.perf_counter()
        for _ in range(CALLS):
            attend(x, grad, H)
        synchronise()
        seconds = (time.perf_counter() - began) / CALLS
    errors = [relative_error(a[some], b) for a, b in zip(first, exact, strict=True)]
    return KernelResult(seconds * 1e3, (errors[0], errors[1]), (repeats[0], repeats[1]))


def attend(x_BTC: Tensor, grad_BTC: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return attention's result and the gradient of x, both (B, T, ...)."""
    x_BTC = x_BTC.detach().requires_grad_()
    B, T, C = grad_BTC.shape
    q_BHTD, k_BHTD, v_BHTD = x_BTC.view(B, T, 3, heads, C // heads).permute(2, 0, 3, 1, 4)
    y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
    y_BTC = y_BHTD.transpose(1, 2).flatten(2)
    (grad_x,) = torch.autograd.grad(y_BTC, x_BTC, grad_BTC)
    return y_BTC.detach(), grad_x


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the largest difference over the largest exact value. NaN where one is NaN."""
    return float((found.double() - exact.double()).abs().max() / exact.double().abs().max())
