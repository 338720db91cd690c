"""Find the elements of a result that rounding may move across a jump, as of a step function or a comparison.

Rounding before `round`, `floor`, `sign`, `>` or `argmax` may move its argument to the other side of a jump. So two
correct kernels differ there by a whole step. Such operations are recognised by their results, not by their names: the
row of the table says that every result is representable, so that a result changes by no more than its arguments do. An
element that changes by more, or an integer that changes at all, has a jump.

First the arguments of these operations are computed with random roundings, and their deviation sigma. Then the
reference is computed with arguments moved by lambda sigma and the rounding of the argument itself, upwards, downwards
and at random. A number that the dtype cannot hold is rounded to it, and is moved as well. Only the elements with a jump
are changed by that. A function without jumps has exactly the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from numerics.oracle.rounding_model.bounds import rule_of
from numerics.oracle.rounding_model.errors import (
    AtenTrace,
    RoundingErrors,
    is_wide,
    operator_name,
    tensors_of,
)
from numerics.oracle.rounding_model.measure import factor, ulp

LARGEST = 1 << 24  # elements of arguments that are kept
BASES = 6  # runs that estimate the deviation of an argument
FLIPS = 8  # runs with moved arguments: four with each argument upwards or downwards, the others at random

Inputs = dict[int, dict[int, Tensor]]  # by the place of a call, then of an argument
Run = Callable[[AbstractContextManager[Any]], Any]


class Arguments(RoundingErrors):
    """Keep the rounded arguments of operations that allow no error of theirs."""

    def __init__(self, trace: AtenTrace, dtype: torch.dtype, seed: int, cast: bool) -> None:
        super().__init__(trace, dtype, seed, cast)
        self.place = -1
        self.inputs: Inputs = {}
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.place += 1
        place, found = self.place, {}
        if not _is_view(func) and self.elements < LARGEST:
            found = {
                number: torch.as_tensor(leaf, dtype=torch.float64).detach().clone()
                for number, leaf in enumerate(tree_leaves((tuple(args), dict(kwargs or {}))))
                if self._moves(leaf)
            }
        result = super().__torch_dispatch__(func, types, args, kwargs)
        exact = rule_of(operator_name(func), args).exact
        if found and (exact or not any(map(is_wide, tensors_of(result)))):
            self.inputs[place] = found
            self.elements += sum(tensor.numel() for tensor in found.values())
        return result

    def _moves(self, leaf: Any) -> bool:
        if isinstance(leaf, Tensor):
            return not leaf.is_complex() and self._is_rounded(leaf)
        return isinstance(leaf, float) and math.isfinite(leaf) and bool(self._misfit(leaf))


class Flips(TorchDispatchMode):
    """Move arguments by `bands`, and keep the change of those elements that have a jump there."""

    def __init__(self, bands: Inputs, direction: int) -> None:
        super().__init__()
        self.bands = bands
        self.direction = direction
        self.generator = torch.Generator().manual_seed(direction)
        self.place = -1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.place += 1
        kwargs = dict(kwargs or {})
        bands = self.bands.get(self.place)
        if not bands:
            return func(*args, **kwargs)
        leaves, form = tree_flatten((tuple(args), kwargs))
        ranks = {number: rank for rank, number in enumerate(bands)}
        moved = [
            self._moved(leaf, bands[number], ranks[number])
            if number in bands
            else (leaf.clone() if isinstance(leaf, Tensor) and func._schema.is_mutable else leaf)
            for number, leaf in enumerate(leaves)
        ]
        moved_args, moved_kwargs = tree_unflatten(moved, form)
        others = tensors_of(func(*moved_args, **moved_kwargs))
        result = func(*args, **kwargs)
        for one, other in zip(tensors_of(result), others, strict=True):
            one.copy_(torch.where(_jumps(func, one, other, list(bands.values())), other, one))
        return result

    def _moved(self, leaf: Any, band: Tensor, rank: int) -> Any:
        if self.direction < 4:
            signs: Any = 1.0 - 2.0 * (self.direction >> rank % 2 & 1)
        else:
            signs = torch.randint(2, band.shape, generator=self.generator) * 2.0 - 1.0
        return leaf + band * signs if isinstance(leaf, Tensor) else leaf + float(band * signs)


def jumping(run: Run, trace: AtenTrace, dtype: torch.dtype, cast: bool) -> list[Any] | None:
    """Return the runs of a reference with arguments beyond a jump: empty if it has none, None if they fail."""
    try:
        bands = _bands(run, trace, dtype, cast)
        return [run(Flips(bands, direction)) for direction in range(FLIPS)] if bands else []
    except Exception:  # a rounding that the operation refuses, or one that changes which operations run
        return None


def slack(exact: Tensor, samples: Sequence[Tensor]) -> Tensor:
    """Return how far jumps may move each element; infinite where a sample has NaN or infinity and `exact` has not."""
    total = torch.zeros(exact.shape, dtype=torch.float64)
    for sample in samples:
        change = (sample - exact).abs().double()
        same = (sample == exact) | (sample.isnan() & exact.isnan())
        total += torch.where(same, 0.0, change.nan_to_num(float("inf"), float("inf"))).square()
    return (total / len(samples)).sqrt() * factor(exact.numel())


def _bands(run: Run, trace: AtenTrace, dtype: torch.dtype, cast: bool) -> Inputs:
    """Return how far rounding may move the arguments."""
    first = Arguments(trace, dtype, 0, cast)
    run(first)
    squares: Inputs = {
        place: {number: torch.zeros_like(value) for number, value in values.items()}
        for place, values in first.inputs.items()
    }
    for seed in range(1, BASES + 1) if squares else ():
        other = Arguments(trace, dtype, seed, cast)
        run(other)
        for place, values in squares.items():
            for number, total in values.items():
                total += (other.inputs[place][number] - first.inputs[place][number]).square() / 2
    half = (1 + 2.0**-10) / 2  # of a unit in the last place
    return {
        place: {
            number: factor(total.numel()) * (total / BASES).sqrt()
            + half * ulp(first.inputs[place][number], dtype)
            for number, total in values.items()
        }
        for place, values in squares.items()
    }


def _jumps(func: Any, one: Tensor, other: Tensor, bands: Sequence[Tensor]) -> Tensor:
    if not is_wide(one):
        return one != other
    if torch.Tag.pointwise in func.tags:
        width: Tensor | float = sum(bands, torch.zeros((), dtype=torch.float64))
    else:
        width = sum(float(band.nan_to_num(0.0).max()) for band in bands if band.numel())
    change = (other - one).abs()
    return (change > (1 + 2.0**-10) * width) | (one.isfinite() != other.isfinite())


def _is_view(func: Any) -> bool:
    return any(part.alias_info is not None and not part.alias_info.is_write for part in func._schema.returns)
