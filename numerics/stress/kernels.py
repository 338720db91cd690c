"""Computations whose result must be equal to the bit each time: matrices, attention, copies, a training step.

Inputs are drawn on the CPU from a seed, so that every device of a kind has the same result.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numerics.stress.patterns import PATTERNS

CPU_SIZES, DEVICE_SIZES = (64, 256), (256, 1024, 4096)
CPU_MEMORY, MOST_MEMORY = 1 << 22, 1 << 33  # bytes of the memory patterns
COMPUTING, COPYING, MEMORY = "computations", "copies", "memory patterns"  # kinds of kernels
MEMORY_SHARE = 16  # of the free memory, one part


@dataclass(frozen=True)
class Kernel:
    """A computation. make: returns inputs on the CPU. run: computes the result on the device of its inputs.

    exact: whether the result is known to be zero in every bit; else a majority of results is taken as golden.
    """

    name: str
    make: Callable[[torch.Generator], tuple[Tensor, ...]]
    run: Callable[..., Tensor]
    exact: bool = False

    def inputs(self, device: str) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        return tuple(value.to(device) for value in self.make(generator))


def kernels(device_type: str, memory_bytes: int | None = None) -> list[Kernel]:
    """Return the kernels for a type of device. memory_bytes: of the memory patterns."""
    is_cpu = device_type == "cpu"
    sizes = CPU_SIZES if is_cpu else DEVICE_SIZES
    dtypes = (torch.float32,) if is_cpu else (torch.float32, torch.bfloat16, torch.float16)
    found = [_matmul(size, dtype) for dtype in dtypes for size in sizes]
    found += [_attention(size, dtypes[-1]) for size in sizes[:2]]
    found += [_copy(size) for size in sizes] + [
        _round_trip(sizes[-1]),
        _elementwise(sizes[-1]),
        _reduce(sizes[-1]),
    ]
    found += [_training_step(32 if is_cpu else 512)]
    size = (memory_bytes or (CPU_MEMORY if is_cpu else _free_memory())) // 8
    return found + [
        Kernel(f"memory: {name}", _buffer(size), run, exact=True) for name, run in PATTERNS.items()
    ]


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name. Each kind has an equal part of the time."""
    if kernel.startswith("memory: "):
        return MEMORY
    return COPYING if "copy" in kernel else COMPUTING


def _free_memory() -> int:
    try:
        free = int(torch.accelerator.get_memory_info()[0])
    except (AttributeError, RuntimeError, NotImplementedError):
        return 1 << 28
    return max(CPU_MEMORY, min(free // MEMORY_SHARE, MOST_MEMORY))


def _draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _matmul(size: int, dtype: torch.dtype) -> Kernel:
    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        return _draw(generator, size, size, dtype=dtype), _draw(generator, size, size, dtype=dtype)

    return Kernel(f"matrix product {size} {_name(dtype)}", make, torch.matmul)


def _attention(size: int, dtype: torch.dtype) -> Kernel:
    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        shape = 2, 4, size, 64
        q, k, v = (_draw(generator, *shape, dtype=dtype) for _ in range(3))
        return q, k, v

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Kernel(f"attention {size} {_name(dtype)}", make, run)


def _copy(size: int) -> Kernel:
    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randint(-(2**62), 2**62, (size, size), generator=generator),)

    return Kernel(f"transposed copy {size}", make, lambda x: x.t().contiguous().t().clone())


def _round_trip(size: int) -> Kernel:
    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randint(-(2**62), 2**62, (size, size), generator=generator),)

    return Kernel(f"copy to the host and back {size}", make, lambda x: x.cpu().clone().to(x.device))


def _elementwise(size: int) -> Kernel:
    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        return (_draw(generator, size, size),)

    return Kernel(f"exp, GELU and softmax {size}", make, lambda x: F.gelu(x).exp().softmax(-1) + x.tanh())


def _reduce(size: int) -> Kernel:
    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        return (_draw(generator, size, size),)

    return Kernel(
        f"sums {size}", make, lambda x: torch.stack([x.sum(0), x.sum(1), F.layer_norm(x, x.shape[-1:])[0]])
    )


def _training_step(width: int) -> Kernel:
    """A step of a small transformer layer: forward, backward and an update of the weights."""
    tokens = 64

    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
        weights = [_draw(generator, *shape) / shape[1] ** 0.5 for shape in shapes]
        return _draw(generator, 4, tokens, width), *weights

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        leaves = [nn.Parameter(value.clone()) for value in weights]
        with torch.enable_grad():
            q, k, v = (F.layer_norm(x, (width,)) @ leaves[0].t()).chunk(3, -1)
            scores = (q @ k.transpose(1, 2)) / width**0.5
            mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
            y = x + scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v @ leaves[1].t()
            y = y + F.gelu(F.layer_norm(y, (width,)) @ leaves[2].t(), approximate="tanh") @ leaves[3].t()
            y.square().mean().backward()
        moved = [leaf.detach() - 0.1 * leaf.grad for leaf in leaves if leaf.grad is not None]
        return torch.cat([value.reshape(-1) for value in moved])

    return Kernel(f"training step {width}", make, run)


def _buffer(size: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda generator: (torch.zeros(size, dtype=torch.int64),)
