"""Measure a result against float64: in units in the last place, and relative to what rounding allows.

    allowed_i = ulp(y_i) / 2 + lambda (sigma_i + rms(sigma))        sigma: numerics.oracle.rounding_model.errors
    ratio     = max(max_i |x_i - y_i| / allowed_i, rms(x - y) / (rms(ulp) / 2 + lambda_1 rms(sigma)))

with y in float64 and x the result. lambda = sqrt(2 ln(2 n / delta)) for n elements, by Hoeffding's inequality and the
union bound; lambda_1 is that of one element. A result with a ratio of at most 1 is accepted.

sigma is estimated from k runs, which is coarse where k is small: for the estimate s, k s^2 / sigma^2 has a chi-square
distribution of k degrees of freedom, also for a whole tensor where all elements share one error. So a ratio above 1 is
no proof. It is one above

    allowed_i = ulp(y_i) / 2 + max(c_k(p / n) lambda(p / n) s_i, lambda (s_i + rms(s)))    lambda(p) = sqrt(2 ln(2 / p))
    c_k(p)    = sqrt(k / q)                                q: the p-quantile of chi-square with k degrees of freedom

and accordingly for the root mean square, with c_k(p) lambda(p) rms(s). Each of four events (s too small or the error
too large, of an element or of the whole) has a probability of at most p. With 4, 16 and 64 runs in turn, a result is
accepted, wrong, or undecided; after 64 it is wrong or accepted by the second bound. So rounding alone is called wrong
with a probability of at most delta = 3 x 4 p for a tensor, whatever the number of its elements.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

DELTA = 1e-6  # probability that rounding alone is called wrong, for one tensor
STAGES = (4, 16, 64)  # runs with random roundings
SHARE = DELTA / (4 * len(STAGES))  # of one event in one stage
SLACK = 1 + 2.0**-20  # for the rounding of the reference itself
EDGES = (
    0.0,
    0.5,
    *(2.0**k for k in range(13)),
)  # of the histogram, in units in the last place; above: the last bin


@dataclass(frozen=True)
class Measure:
    """max_ulps, rms_ulps: of the error in units in the last place. distance: Euclidean, relative to the reference's.

    ratio: of the error to what rounding allows. histogram: elements with an error up to each of EDGES, and above.
    flushed: results that are zero where the reference is subnormal. why: in words, where the ratio is infinite.
    """

    elements: int
    max_ulps: float = 0.0
    rms_ulps: float = 0.0
    distance: float = 0.0
    ratio: float = 0.0
    histogram: tuple[int, ...] = field(default=(), repr=False)
    flushed: int = 0
    why: str = ""

    @property
    def wrong(self) -> bool:
        return self.ratio > 1


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbours of a dtype at values in float64."""
    limits = torch.finfo(dtype)
    _, exponent = torch.frexp(values)
    spacing = torch.ldexp(torch.full_like(values, limits.eps), exponent.to(torch.float64) - 1)
    return torch.where(values == 0, 0.0, spacing).clamp_(min=limits.tiny * limits.eps)


def factor(elements: int) -> float:
    """Return lambda, the number of standard deviations that rounding alone may reach."""
    return math.sqrt(2 * math.log(2 * max(elements, 1) / DELTA))


@functools.lru_cache(maxsize=256)
def coarseness(runs: int, probability: float) -> float:
    """Return c: sigma is at most c times its estimate from so many runs, but with this probability."""
    half = torch.tensor(runs / 2, dtype=torch.float64)
    low, high = -700.0, math.log(runs / 2)  # of log(quantile / 2)
    for _ in range(60):
        middle = (low + high) / 2
        below = (
            torch.special.gammainc(half, torch.tensor(math.exp(middle), dtype=torch.float64)) < probability
        )
        low, high = (middle, high) if below else (low, middle)
    return math.sqrt(runs / 2 / math.exp(low))


def tail(probability: float) -> float:
    """Return how many standard deviations a sum of random signs exceeds with at most this probability."""
    return math.sqrt(2 * math.log(2 / probability))


def squared_change(reference: Tensor, sample: Tensor) -> Tensor:
    """Return the squared change of each element; flat for complex numbers."""
    if reference.is_complex():
        reference, sample = _parts(reference), _parts(sample)
    return (sample - reference).square().nan_to_num(0.0, 0.0, 0.0)


def measure(
    result: Tensor,
    reference: Tensor,
    sigma: Tensor,
    dtype: torch.dtype,
    runs: int | None = None,
    jumps: Tensor | None = None,
) -> Measure:
    """Measure a result. reference, sigma: float64. dtype: that the kernel rounds its result to.

    runs: that sigma was estimated from, for the bound whose excess is a proof; None for the bound that accepts.
    jumps: is added to what is allowed, for each element; one with an infinite jump is not compared.
    """
    if result.shape != reference.shape:
        shapes = f"{list(result.shape)} against {list(reference.shape)}"
        return Measure(
            result.numel(), math.inf, math.inf, math.inf, math.inf, why=f"shape {shapes} in float64"
        )
    x, y = _parts(result), _parts(reference)
    if not x.numel():
        return Measure(0, histogram=(0,) * (len(EDGES) + 1))
    sigma = sigma if sigma.shape == y.shape else _parts(sigma)
    step = torch.zeros_like(y) if jumps is None else jumps.flatten()
    known = step.isfinite()
    x, y, sigma, step = x[known], y[known], sigma[known], step[known]
    if not x.numel():
        return Measure(0, histogram=(0,) * (len(EDGES) + 1))
    limits = torch.finfo(dtype)
    # the largest number of float64 is that of the dtype, as nan_to_num returns it
    y = torch.where(y.abs() == torch.finfo(torch.float64).max, y.sign() * limits.max, y)
    usable = x.isfinite() & y.isfinite()
    deviations, typical_deviations = factor(x.numel()), factor(1)
    proving = deviations
    if runs is not None:
        each = SHARE / x.numel()
        proving = coarseness(runs, each) * tail(each)
        typical_deviations = coarseness(runs, SHARE) * tail(SHARE)
    why = _bad_numbers(x, y, proving * sigma + step, limits)
    x, y, sigma, step = x[usable], y[usable], sigma[usable], step[usable]
    if not x.numel():
        counts = (
            (int(usable.numel()), *(0,) * len(EDGES))
            if not why
            else (0,) * len(EDGES) + (int(usable.numel()),)
        )
        return Measure(usable.numel(), ratio=math.inf if why else 0.0, why=why, histogram=counts)
    error, unit = (x - y).abs(), ulp(y, dtype).clamp_(min=1e-300)  # half a unit of float64 may be 0
    flushed = (x == 0) & (y != 0) & (y.abs() < limits.tiny)
    floor = _rms(sigma)
    allowed = unit / 2 * SLACK + torch.maximum(deviations * (sigma + floor), proving * sigma) + step
    allowed += flushed * limits.tiny
    highest = float((error / allowed).max())
    typical = (
        _rms(error[~flushed])
        / (
            _rms(unit[~flushed]) / 2 * SLACK
            + typical_deviations * _rms(sigma[~flushed])
            + _rms(step[~flushed])
        )
        if not bool(flushed.all())
        else 0.0
    )
    ulps = error / unit
    bins = torch.bucketize(ulps, torch.tensor(EDGES, dtype=torch.float64)).bincount(minlength=len(EDGES) + 1)
    size = _rms(y)
    return Measure(
        usable.numel(),
        float(ulps.max()),
        _rms(ulps),
        _rms(error) / size if size else (math.inf if bool(error.any()) else 0.0),
        math.inf if why else max(highest, typical),
        tuple(bins.tolist()),
        int(flushed.sum()),
        why,
    )


def measure_exact(result: Tensor, reference: Tensor, compared: Tensor | None = None) -> Measure:
    """Measure integers and truth values, which have no rounding. compared: which elements; all where it is None."""
    if result.shape != reference.shape:
        return Measure(
            result.numel(), ratio=math.inf, why=f"shape {list(result.shape)} against {list(reference.shape)}"
        )
    if compared is not None:
        result, reference = result[compared], reference[compared]
    wrong = int((result != reference).sum())
    why = f"{wrong:,} of {result.numel():,} elements differ" if wrong else ""
    return Measure(result.numel(), ratio=math.inf if wrong else 0.0, why=why)


def _bad_numbers(x: Tensor, y: Tensor, tolerance: Tensor, limits: torch.finfo) -> str:
    """Say where x is NaN or infinite and y, rounded to the dtype, is not; or the other way round."""
    if bool(x.isfinite().all()) and float(y.abs().max()) < limits.max / 2:  # NaN is not below
        return ""
    bound = y.abs() - ulp(y.abs().clamp(max=limits.max), _dtype(limits)) / 2 - tolerance
    above = y.abs() + tolerance + ulp(y.abs().clamp(max=limits.max), _dtype(limits))
    may_overflow = (above >= limits.max) & ~y.isnan()
    must_overflow = (bound > limits.max) & ~y.isnan()
    parts = []
    if count := int((x.isnan() & ~y.isnan()).sum()):
        parts.append(f"{count:,} NaN where float64 has {_example(y[x.isnan() & ~y.isnan()])}")
    if count := int((~x.isnan() & y.isnan()).sum()):
        parts.append(
            f"{count:,} numbers where float64 has NaN, such as {_example(x[~x.isnan() & y.isnan()])}"
        )
    infinite = x.isinf() & ~y.isnan() & ~((may_overflow | y.isinf()) & (x.sign() == y.sign()))
    if count := int(infinite.sum()):
        parts.append(f"{count:,} infinite where float64 has {_example(y[infinite])}")
    finite = x.isfinite() & must_overflow
    if count := int(finite.sum()):
        parts.append(
            f"{count:,} finite where float64 has {_example(y[finite])}, such as {_example(x[finite])}"
        )
    return "; ".join(parts)


def _dtype(limits: torch.finfo) -> torch.dtype:
    return getattr(torch, limits.dtype)  # type: ignore[no-any-return]


def _example(values: Tensor) -> str:
    return f"{float(values.flatten()[0]):.4g}"


def _parts(tensor: Tensor) -> Tensor:
    """Return a flat float64 tensor; real and imaginary parts of complex numbers."""
    tensor = tensor.detach().cpu()
    tensor = (
        torch.view_as_real(tensor.to(torch.complex128).resolve_conj())
        if tensor.is_complex()
        else tensor.double()
    )
    return tensor.flatten()


def _rms(values: Tensor) -> float:
    largest = float(values.abs().max()) if values.numel() else 0.0
    return (
        largest * float((values / largest).square().mean().sqrt()) if largest else 0.0
    )  # squares may underflow
