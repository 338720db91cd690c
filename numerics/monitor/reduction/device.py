"""Reduce lists of tensors on another device than the CPU: a fixed number of operations, and no synchronisation.

torch's foreach operations run one kernel for many tensors of one dtype. Each tensor gives eight sums and extremes, from
which the host computes its statistics:

- Sums, squares and counts are accumulated in float64 from the elements as they are, bfloat16 and float16 included. So
  counts are exact, and mean and norm are exact to the rounding of float64. The deviation is the square root of a
  difference, with a relative error of about 1e-16 x (mean / deviation)^2. Below 1e-7 of the mean, about one unit in the
  last place of float32, it counts as 0.
- Largest and smallest value are computed in the tensor's dtype and are exact.

A device may lack such an operation or float64, or treat NaN in another way. So the first use of a device and dtype
compares a few tensors with special values against the CPU's path, with one synchronisation. A device that differs uses
`reduce_one`, about 15 kernels for each tensor, with float32 sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from numerics.monitor.reduction.cpu import cpu_row
from numerics.monitor.reduction.moments import Moments

WIDTH = 8  # numbers of a row
FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DEVICE_CHUNK = 2**24  # elements of a part in `reduce_one`: counts up to it are exact in float32
DEVICE_BATCH = 2**26  # elements of a list: the operations need one copy of it, 256 MiB in float32
SAMPLES = (
    [1.0, -2.0, 0.0, 3.5],
    [-3.0, -0.25, -7.0],
    [2.0, 0.5, 2.0, 2.0],
    [0.0, 0.0, -0.0],
    [math.nan, 1.0, 0.0],
    [math.inf, -1.0, 0.0],
    [-math.inf, -1.0],
    [math.nan, math.inf, -math.inf, 2.0],
    [-math.inf, -math.inf],
)
LONG = 2**17 + 3  # elements: longer than the parts in which a kernel reads a tensor
NO_DEVIATION = 1e-14  # of the squares: the rounding of their sum in float64


def reduce_many(tensors: list[Tensor]) -> Tensor:
    """Return one row for each tensor, (n, WIDTH) float64.

    tensors: of one device and one of FUSED_DTYPES; dense, not empty.
    """
    count = functools.partial(torch._foreach_norm, ord=1, dtype=torch.float64)
    root = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    work = torch._foreach_neg(tensors)
    lowest = _largest(work)
    torch._foreach_clamp_min_(work, 0)
    below = count(work)  # the sum of the negative elements, without its sign
    torch._foreach_copy_(work, tensors)
    torch._foreach_clamp_min_(work, 0)
    above = count(work)
    torch._foreach_copy_(work, tensors)
    torch._foreach_sign_(work)  # 0 of nan
    nonzero = count(work)
    torch._foreach_copy_(work, tensors)
    torch._foreach_abs_(work)
    torch._foreach_add_(work, 1)
    torch._foreach_sign_(work)
    numbers = count(work)  # inf is one, nan is none
    torch._foreach_copy_(work, tensors)
    torch._foreach_mul_(work, 0)  # nan of inf
    torch._foreach_add_(work, 1)
    torch._foreach_sign_(work)
    finite = count(work)
    sums = torch.stack([*root, *below, *above, *nonzero, *numbers, *finite])
    extremes = torch.stack([*lowest, *_largest(tensors)]).double()
    return torch.cat([sums, extremes]).view(WIDTH, len(tensors)).T.contiguous()


def _largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest element of each tensor, by one operation for each size.

    In a list of several sizes CUDA's kernel also compares with 0 (output_per_tensor of torch's ForeachReduceOp.cu).
    """
    places: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.numel(), []).append(place)
    found: dict[int, Tensor] = {}
    for same in places.values():
        found.update(zip(same, torch._foreach_max([tensors[place] for place in same]), strict=True))
    return [found[place] for place in range(len(tensors))]


def moments_of_sums(count: int, row: Sequence[float]) -> Moments:
    """Return the statistics of a tensor with `count` elements, of its row of `reduce_many`."""
    root, below, above, nonzero, numbers, finite, lowest, high = row
    nan, inf, low = count - numbers, numbers - finite, -lowest
    if nan:
        low = high = math.nan
    elif inf == count:  # CUDA's kernel has no extreme below the smallest number
        low, high = -math.inf if below else math.inf, math.inf if above else -math.inf
    if nan or inf:
        return Moments(count, 0.0, 0.0, low, high, nonzero + nan, nan, inf)
    mean, squares = (above - below) / count, root * root
    deviations = squares - count * mean * mean if math.isfinite(squares) else math.inf
    deviations = deviations if deviations > NO_DEVIATION * squares else 0.0
    return Moments(count, mean, deviations, low, high, nonzero)


def reduce_one(part: Tensor) -> Tensor:
    """Return the Moments of one part after its count, and 0: (WIDTH,) float32, by about 15 kernels."""
    part = part if part.dtype in (torch.float32, torch.float64) else part.float()
    low, high = part.aminmax()
    variance, mean = torch.var_mean(part, correction=0)
    finite = low.isfinite() & high.isfinite()
    zero = torch.zeros_like(mean)
    return torch.stack(
        [
            torch.where(finite, mean, zero),
            torch.where(finite, variance * part.numel(), zero),
            low,
            high,
            part.count_nonzero(),
            part.isnan().sum(),
            part.isinf().sum(),
            zero,
        ]
    ).float()


@functools.cache
def fused(device_type: str, dtype: torch.dtype) -> bool:
    """Whether `reduce_many` agrees with the CPU's path on a device, for a dtype. Computed once for both."""
    if dtype not in FUSED_DTYPES:
        return False
    samples = [torch.tensor(values, dtype=dtype) for values in SAMPLES]
    samples.append(torch.linspace(1, 2, LONG).to(dtype))
    try:
        with torch.no_grad():
            rows = reduce_many([sample.to(device_type) for sample in samples]).tolist()
    except (RuntimeError, TypeError, AttributeError):  # float64 or an operation is missing
        return False
    return all(
        agrees(moments_of_sums(len(sample), row), Moments(len(sample), *cpu_row(sample)))
        for sample, row in zip(samples, rows, strict=True)
    )


def agrees(found: Moments, exact: Moments) -> bool:
    """Whether statistics are equal but for rounding."""
    counted = ("count", "low", "high", "nonzero", "nan", "inf")
    equal = all(str(float(getattr(found, name))) == str(float(getattr(exact, name))) for name in counted)
    close = all(
        math.isclose(getattr(found, name), getattr(exact, name), rel_tol=1e-5, abs_tol=1e-6)
        for name in ("mean", "deviations")
    )
    return equal and close
