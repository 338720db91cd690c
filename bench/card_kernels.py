"""Check the fused attention kernels of a device: which one runs, its error, its repeatability and its speed."""

from __future__ import annotations

import functools
import shutil
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.card_checks import MEASURED, CardCheck, CheckedDevice, judge, not_run, number
from bench.runner import BenchError, BenchWorker
from gpt2.clocks import device_synchroniser
from runtime import attention_kernels
from runtime.attention_kernels import TOLERANCE
from runtime.gpu_specs import GIB
from runtime.resolved_target import ResolvedTarget
from study.planning.micro_batch import LISTED_BY

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


def fact_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Report what the other checks need: driver, compiler, headers, cuDNN."""
    listed = [LISTED_BY[card.resolved.target.kind].split()[0], "gcc", "make", "git"]
    missing = [program for program in listed if not shutil.which(program)]
    headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    cudnn: Any = torch.backends.cudnn
    texts = {
        "driver": card.resolved.driver or "none",
        "memory": f"{card.resolved.memory_bytes / GIB:.2f} GiB",
        "cuDNN": f"{cudnn.version() or 'none'}",
        "Python.h": "present" if headers else "missing",
        "programs": f"without {', '.join(missing)}" if missing else ", ".join(listed),
    }
    for name, text in texts.items():
        yield CardCheck(f"facts: {name}", "", text, MEASURED)


def kernel_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Check the order first, in a new process: torch sets its own order at the first call of a process."""
    resolved, shape = card.resolved, SHAPES[card.on_cpu][0]
    names = usable_kernels(resolved)
    with BenchWorker("attention kernels") as worker:
        ran = worker.call(selected_kernels, resolved, limit_seconds=LIMIT_SECONDS)
        expected = f"{names[0]} at the first and the second call of a process (of {', '.join(names)})"
        yield judge("kernels: order", expected, ", ".join(ran), set(ran) == {names[0]})
        yield from shape_checks(card, worker, shape)
    milliseconds = {
        name: card.values[line] for name in names if (line := kernel_line(name, shape)) in card.values
    }
    name, expected = "kernels: speed", f"{names[0]} takes at most {SLOWER:g} times the fastest kernel's time"
    if len(milliseconds) < 2 or names[0] not in milliseconds:
        yield not_run(name, expected, f"kernels measured: {', '.join(milliseconds) or 'none'}")
        return
    ratio = milliseconds[names[0]] / min(milliseconds.values())
    yield number(name, expected, f"{ratio:.2f} times", ratio)


def other_shapes(card: CheckedDevice) -> Iterator[CardCheck]:
    """Check the kernels at the other shapes."""
    with BenchWorker("attention kernels") as worker:
        for shape in SHAPES[card.on_cpu][1:]:
            yield from shape_checks(card, worker, shape)


def usable_kernels(resolved: ResolvedTarget) -> list[str]:
    """Return the kernels of the row that support its dtype, in the order of preference."""
    half_only = resolved.dtype == "float32" and resolved.device_type == "cuda"
    order = attention_kernels.kernel_order(resolved)
    return [name for name in order if not half_only or name == "efficient"]


def kernel_line(kernel: str, shape: Shape) -> str:
    return f"kernels: {kernel}, {' x '.join(map(str, shape))}"


def shape_checks(card: CheckedDevice, worker: BenchWorker, shape: Shape) -> Iterator[CardCheck]:
    """Check each kernel at one shape. The value of a line is its milliseconds."""
    resolved = card.resolved
    limit = TOLERANCE[resolved.dtype]
    expected = f"error at most {limit:g}, result repeats to the bit"
    for kernel in KERNELS:
        name = kernel_line(kernel, shape)
        if kernel not in usable_kernels(resolved):
            yield not_run(name, expected, f"not a kernel of {resolved.target.name} in {resolved.dtype}")
            continue
        try:
            arguments = (resolved.device, resolved.dtype, kernel, shape)
            result = worker.call(measure_kernel, *arguments, limit_seconds=LIMIT_SECONDS)
        except BenchError as error:
            yield judge(name, expected, f"{error}", False)
            continue
        good = all(error <= limit for error in result.errors) and result.repeats[0]
        yield replace(judge(name, expected, describe(result), good), value=result.milliseconds)


def describe(result: KernelResult) -> str:
    yes, no = "repeats", "does NOT repeat"
    texts = [
        f"{part}: error {error:.1e}, {yes if repeats else no} to the bit"
        for part, error, repeats in zip(("result", "gradient"), result.errors, result.repeats, strict=True)
    ]
    return f"{result.milliseconds:.2f} ms forward and backward; {'; '.join(texts)}"


# ---- in a worker


def selected_kernels(resolved: ResolvedTarget) -> list[str]:
    """Return the kernel that ran in each of two calls. Call it first in a process."""
    return [attention_kernels.check_attention(resolved, 12, 64).attention_backend for _ in range(2)]


@functools.lru_cache(maxsize=1)
def problem(device: str, dtype: str, shape: Shape) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Draw x (B, T, 3 H D) and the result's gradient (B, T, H D), once for all kernels.

    Also returns attention of the first sequences and the gradient of x in float32, by the definition.
    """
    B, H, T, D = shape
    draw = torch.Generator(device).manual_seed(0)
    x, grad = (
        torch.randn(B, T, width, generator=draw, device=device, dtype=getattr(torch, dtype))
        for width in (3 * H * D, H * D)
    )
    with sdpa_kernel(SDPBackend.MATH):
        return x, grad, attend(x[:EXACT_SEQUENCES].float(), grad[:EXACT_SEQUENCES].float(), H)


def measure_kernel(device: str, dtype: str, kernel: str, shape: Shape) -> KernelResult:
    """Run one kernel forward and backward on views of one projection, as in the model."""
    x, grad, exact = problem(device, dtype, shape)
    H = shape[1]
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
    errors = [relative_error(a[:EXACT_SEQUENCES], b) for a, b in zip(first, exact, strict=True)]
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
