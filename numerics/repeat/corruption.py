"""Name the shape of a difference between two tensors that should be equal, section 2.3.2.1.

The difference has a place (which elements) and a change (what happened to them). A product of index ranges is tried
first, then a run in memory order, then several equal runs. Nothing is named that the elements do not show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from numerics.describe import NoValuesError, plain_values
from numerics.errors import NumericsError
from numerics.record.tensor_digest import bits_of

DENSE = 0.9  # of a region: single elements may be equal by chance
BLOCK = 2048  # bytes and elements of a block of memory on Ascend devices
MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
SIGN = {torch.float64: 63, torch.float32: 31, torch.float16: 15, torch.bfloat16: 15}
MOST_LISTED = 6  # indices or runs in a sentence

SINGLE, ALL, ROWS, COLUMNS, TILE = "single element", "all elements", "rows", "columns", "tile"
RUN, RUNS, SCATTERED, NOWHERE = "run", "equal runs", "scattered", "nowhere"
BIT, MASK, NAN, ZERO, CONSTANT = "single bit", "same bits", "NaN", "zeros", "constant"
ALL_NAN = NAN  # beside the condition of this name
SHIFT, ADDED, ROUNDING, OTHER = "shifted copy", "added constant", "rounding", "other values"


@dataclass(frozen=True)
class Corruption:
    """A difference. place and change: one of the names above; each has its sentence.

    count: differing elements of `size`. largest: absolute difference, relative: divided by the largest finite value;
    both None where a difference is not finite, and for integers. bits: positions of the flipped bits of a single bit.
    """

    place: str
    change: str
    place_text: str
    change_text: str
    count: int
    size: int
    shape: tuple[int, ...]
    dtype: str
    largest: float | None = None
    relative: float | None = None
    bits: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.count:
            return "no element differs"
        return f"{self.count} of {self.size} elements differ: {self.place_text}; {self.change_text}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def analyse(good: Tensor, bad: Tensor, terms: int = 1, inputs: Sequence[Tensor] = ()) -> Corruption:
    """Compare two tensors of one shape and dtype. NumericsError where these differ.

    terms: numbers in the sums that made one element, at most; rounding grows with its square root. inputs: of the
    operation, which may round in the coarsest of their formats.
    """
    if good.shape != bad.shape or good.dtype != bad.dtype:
        raise NumericsError(
            f"tensors of {tuple(good.shape)} {good.dtype} and {tuple(bad.shape)} {bad.dtype} cannot be compared; "
            "fix: give two tensors of one shape and dtype"
        )
    good, bad = good.detach().cpu(), bad.detach().cpu()
    shape = tuple(good.shape) + ((2,) if good.is_complex() else ())
    before, after = (bits_of(side).numpy() for side in (good, bad))
    where = np.flatnonzero(before != after)
    dtype = str(good.dtype).removeprefix("torch.")
    if not len(where):
        return Corruption(NOWHERE, "none", "", "", 0, before.size, shape, dtype)
    eps = max((torch.finfo(one.dtype).eps for one in inputs if one.is_floating_point()), default=0.0)
    place, place_text = _place(where, shape, before.itemsize)
    largest, relative = _sizes(good, bad)
    change, change_text, flipped = _change(where, before, after, good, bad, largest, terms, eps)
    if largest is not None and change != NAN:
        change_text += f"; the largest difference is {largest:.3g}"
        change_text += f", {relative:.3g} of the largest value" if relative is not None else ""
    return Corruption(
        place,
        change,
        place_text,
        change_text,
        len(where),
        before.size,
        shape,
        dtype,
        largest,
        relative,
        flipped,
    )


def dense(tensor: Tensor) -> Tensor:
    """Return the values as a dense tensor; an empty one where they cannot be read."""
    try:
        return plain_values(tensor)
    except NoValuesError:
        return torch.empty(0)


# -- where


def _place(where: np.ndarray, shape: Sequence[int], itemsize: int) -> tuple[str, str]:
    size, count = math.prod(shape), len(where)
    index = np.unravel_index(where, shape) if shape else ()
    if count == 1:
        place = ", ".join(str(int(axis[0])) for axis in index)
        return SINGLE, f"element [{place}], {int(where[0]) * itemsize} bytes from the start of the tensor"
    if count >= DENSE * size:
        return ALL, "all elements" if count == size else "nearly all elements"
    touched = [np.unique(axis) for axis in index]
    full = [len(values) == length for values, length in zip(touched, shape, strict=True)]
    volume = math.prod(len(values) for values in touched)
    is_box, first, last = count >= DENSE * volume, int(where[0]), int(where[-1])
    is_run = count >= DENSE * (last - first + 1)
    memory = _run_text(first, last - first + 1, itemsize)
    if is_box and len(shape) > 1 and full[-1] and shape[-1] > 1:
        part = _box_text(touched[:-1], full[:-1], shape)
        return ROWS, f"whole rows: {part}" + (f"; {memory}" if is_run else "")
    if is_box and len(shape) > 1 and all(full[:-1]) and math.prod(shape[:-1]) > 1:
        return COLUMNS, f"whole columns: index {_indices(touched[-1])} of the last dimension"
    if is_run:
        return RUN, memory
    if is_box and sum(len(values) > 1 for values in touched) > 1:
        sizes = " x ".join(str(len(values)) for values in touched)
        return TILE, f"a tile of {sizes}: {_box_text(touched, full, shape)}"
    return _runs(where, itemsize)


def _box_text(touched: Sequence[np.ndarray], full: Sequence[bool], shape: Sequence[int]) -> str:
    parts = [
        f"index {_indices(values)} of dimension {axis} (size {shape[axis]})"
        for axis, (values, whole) in enumerate(zip(touched, full, strict=True))
        if not whole
    ]
    return ", ".join(parts)


def _indices(values: np.ndarray) -> str:
    numbers = [int(value) for value in values]
    if len(numbers) == 1:
        return str(numbers[0])
    steps = set(np.diff(values).tolist())
    if len(steps) == 1:
        (step,) = steps
        return f"{numbers[0]} to {numbers[-1]}" + (f", every {step}" if step > 1 else "")
    listed = ", ".join(map(str, numbers[:MOST_LISTED]))
    return listed + (f" and {len(numbers) - MOST_LISTED} more" if len(numbers) > MOST_LISTED else "")


def _run_text(first: int, length: int, itemsize: int) -> str:
    text = f"a run of {length} elements ({length * itemsize} bytes) from element {first}"
    fits = [
        f"{length * unit // BLOCK} x {BLOCK} {name}"
        for unit, name in ((1, "elements"), (itemsize, "bytes"))
        if length * unit % BLOCK == 0
    ]
    begins = [name for unit, name in ((1, "elements"), (itemsize, "bytes")) if first * unit % BLOCK == 0]
    text += f"; its length is {' = '.join(dict.fromkeys(fits))}" if fits else ""
    return text + (f"; it begins at a multiple of {BLOCK} {begins[0]}" if begins and fits else "")


def _runs(where: np.ndarray, itemsize: int) -> tuple[str, str]:
    """Name several runs of one length at one distance, or scattered elements."""
    breaks = np.flatnonzero(np.diff(where) > 1)
    starts = np.concatenate([where[:1], where[breaks + 1]])
    lengths = np.concatenate([where[breaks], where[-1:]]) - starts + 1
    longest = int(lengths.max())
    common = lengths >= DENSE * longest
    if longest > 1 and len(starts) > 1 and common.all():
        distances = set(np.diff(starts).tolist())
        text = f"{len(starts)} runs of {longest} elements ({longest * itemsize} bytes)"
        multiple = longest % BLOCK == 0 or longest * itemsize % BLOCK == 0
        text += f", a multiple of {BLOCK}" if multiple else ""
        if len(distances) == 1:
            text += f", {distances.pop()} elements apart"
        return RUNS, f"{text}, the first from element {int(starts[0])}"
    listed = ", ".join(str(int(value)) for value in where[:MOST_LISTED])
    more = f" and {len(where) - MOST_LISTED} more" if len(where) > MOST_LISTED else ""
    return SCATTERED, f"scattered elements {listed}{more}"


# -- what


def _change(
    where: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    good: Tensor,
    bad: Tensor,
    largest: float | None,
    terms: int,
    eps: float,
) -> tuple[str, str, tuple[int, ...]]:
    width = before.itemsize * 8
    unsigned = np.dtype(f"u{before.itemsize}")
    old, new = before[where].view(unsigned), after[where].view(unsigned)
    flips = old ^ new
    either = int(np.bitwise_or.reduce(flips))
    positions = tuple(bit for bit in range(width) if either >> bit & 1)
    values = _values(bad)[where] if bad.dtype.is_floating_point or bad.is_complex() else None
    origin = _values(good)[where] if values is not None else None
    rounding = _rounding(good, largest, terms, eps)
    if len(positions) == 1:
        text = _bit_text(positions[0], old, good.dtype)
        return (ROUNDING, f"{rounding}; {text}", positions) if rounding else (BIT, text, positions)
    if values is not None and origin is not None and np.isnan(values).all() and not np.isnan(origin).any():
        return NAN, "every differing value is NaN", ()
    if not new.any():
        return ZERO, "every differing value is 0", ()
    if len(where) > 1:
        if shift := _shift(where, before, after):
            side = "later" if shift > 0 else "earlier"
            return SHIFT, f"the values are those {abs(shift)} elements {side} in the other tensor", ()
        if (new == new[0]).all():
            shown = f"{values[0]:.6g}" if values is not None else str(int(after[where[0]]))
            return CONSTANT, f"every differing value is {shown} (bits {int(new[0]):#x})", ()
        if (flips == flips[0]).all():
            return MASK, f"every value has the same flipped bits {list(positions)}", positions
    if values is None or origin is None or largest is None:
        return OTHER, f"{len(positions)} different bits changed", ()
    added = values.astype(np.float64) - origin.astype(np.float64)
    middle = float(np.median(added))
    spread = torch.finfo(good.dtype).eps * max(float(np.abs(origin).max()), float(np.abs(values).max()))
    if rounding:
        return ROUNDING, rounding, ()
    if len(where) > 1 and abs(middle) > 8 * spread and np.all(np.abs(added - middle) <= spread):
        return ADDED, f"every differing value has {middle:.6g} added", ()
    if len(where) == 1:
        return OTHER, f"the value {origin[0]:.6g} became {values[0]:.6g}, {len(positions)} bits changed", ()
    return OTHER, "the new values have no common form", ()


def _rounding(good: Tensor, largest: float | None, terms: int, eps: float) -> str:
    """Return a sentence if the largest difference is at most eps max|good| sqrt(terms), else "".

    The rounding errors of a sum of n terms grow with sqrt(n) where they are independent.
    """
    if largest is None:
        return ""
    values = np.abs(_values(good))
    scale = float(np.max(values, initial=0.0, where=np.isfinite(values)))
    if largest > max(torch.finfo(good.dtype).eps, eps) * scale * math.sqrt(max(terms, 1)):
        return ""
    return f"the differences are of the size of rounding in sums of at most {terms} terms"


def _values(tensor: Tensor) -> np.ndarray:
    """Return the values flat, in float64 at least for types that numpy lacks."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat: np.ndarray = tensor.to(torch.float64).contiguous().reshape(-1).numpy()
    return flat


def _sizes(good: Tensor, bad: Tensor) -> tuple[float | None, float | None]:
    if not (good.is_floating_point() or good.is_complex()):
        return None, None
    one, other = _values(good), _values(bad)
    with np.errstate(invalid="ignore", over="ignore"):
        differences = np.abs(one - other)
    differences = differences[~((one == other) | (np.isnan(one) & np.isnan(other)))]
    if not np.isfinite(differences).all():
        return None, None
    largest = float(differences.max(initial=0.0))
    scale = float(np.max(np.abs(one), initial=0.0, where=np.isfinite(one)))
    return largest, largest / scale if scale else None


def _bit_text(bit: int, old: np.ndarray, dtype: torch.dtype) -> str:
    part = ""
    if dtype in MANTISSA:
        mantissa, sign = MANTISSA[dtype], SIGN[dtype]
        part = " (mantissa)" if bit < mantissa else " (sign)" if bit == sign else " (exponent)"
    was = (old >> np.array(bit, dtype=old.dtype)) & np.array(1, dtype=old.dtype)
    if len(old) == 1:
        return f"bit {bit}{part} is flipped from {int(was[0])} to {1 - int(was[0])}"
    way = " to 1" if not was.any() else " to 0" if was.all() else ""
    return f"bit {bit}{part} is flipped{way} in each of them"


def _shift(where: np.ndarray, before: np.ndarray, after: np.ndarray) -> int:
    """Return the distance s with after[i] = before[i + s] at every differing element; 0 where there is none.

    An element whose value is rare in `before` proposes its distances; all elements confirm.
    """
    values, counts = np.unique(before, return_counts=True)
    position = np.searchsorted(values, after[where]).clip(max=len(values) - 1)
    known = values[position] == after[where]
    if not known.all():
        return 0
    rarest = int(np.argmin(counts[position]))
    if len(np.unique(after[where])) < 2:
        return 0  # a constant fits many distances
    sources = np.flatnonzero(before == after[where[rarest]])
    for source in sources[:64]:
        shift = int(source) - int(where[rarest])
        moved = where + shift
        if shift and moved[0] >= 0 and moved[-1] < before.size and (before[moved] == after[where]).all():
            return shift
    return 0
