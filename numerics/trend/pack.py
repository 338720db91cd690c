"""Pack tables for the page: 16-bit codes of values, the largest and the smallest of each group of steps.

A code grows with the value, so the page finds extremes, colors and heights by codes alone. Codes: 0 no value; 1 to
TOP values on the scale of the map; then -Inf, +Inf and NaN. Groups are of successive recorded steps; without grouping a
map has one code a value. The bytes are compressed by zlib, high bytes first, as base64.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numerics.trend.history import Flags, Floats

Codes = NDArray[np.uint16]
TOP, MINUS, PLUS, NAN = 65532, 65533, 65534, 65535
LOG, ASINH, LINEAR = "log", "asinh", "linear"
SCALES = {"norm": LOG, "std": LOG, "ratio": LOG, "mean": ASINH, "min": ASINH, "max": ASINH, "units": ASINH}


@dataclass(frozen=True)
class Scale:
    """value = f(low + (code - 1) / (TOP - 1) x (high - low)), f of the kind: exp, unit x sinh, or the value itself.

    zero: on a log scale code 1 is zero, and values begin at 2.
    """

    kind: str
    low: float
    high: float
    unit: float = 1.0

    def codes(self, values: Floats, present: Flags) -> Codes:
        """Return the codes of values (tensors, steps)."""
        wide = values.astype(np.float64)
        with np.errstate(all="ignore"):
            if self.kind == LOG:
                wide = np.log(wide)
            elif self.kind == ASINH:
                wide = np.arcsinh(wide / self.unit)
            share = (wide - self.low) / (self.high - self.low or 1.0)
            found = np.clip(np.rint(np.nan_to_num(share) * (TOP - 1)), 0, TOP - 1).astype(np.uint16) + 1
        if self.kind == LOG:
            found = np.where(values > 0, np.maximum(found, 2), 1)
        for flags, code in (
            (np.isneginf(values), MINUS),
            (np.isposinf(values), PLUS),
            (np.isnan(values), NAN),
        ):
            found[flags] = code
        found[~present] = 0
        return found.astype(np.uint16)

    def as_json(self) -> dict[str, Any]:
        return vars(self)


def scale_of(statistic: str, parts: list[Floats]) -> Scale:
    """Return one scale for all parts of a statistic: ranks and runs, so that their colors mean the same."""
    finite = np.concatenate(
        [part[np.isfinite(part)].ravel() for part in parts] or [np.empty(0, np.float32)]
    ).astype(np.float64)
    kind = SCALES.get(statistic, LINEAR)
    if kind == LOG:
        finite = np.log(finite[finite > 0])
    unit = 1.0
    if kind == ASINH:
        sizes = np.abs(finite[finite != 0])
        unit = float(np.median(sizes)) if len(sizes) else 1.0
        finite = np.arcsinh(finite / unit)
    if not len(finite):
        return Scale(kind, 0.0, 1.0, unit)
    low, high = float(finite.min()), float(finite.max())
    return Scale(kind, low, high if high > low else low + 1.0, unit)


def pack(codes: Codes, group: int) -> tuple[str, bool]:
    """Return the bytes as base64, and whether each cell is one value. codes: (tensors, steps)."""
    if group > 1:
        missing = -codes.shape[1] % group
        codes = np.pad(codes, ((0, 0), (0, missing)))
        grouped = codes.reshape(len(codes), -1, group)
        largest = grouped.max(axis=2)
        finite = np.where((grouped > 0) & (grouped <= TOP), grouped, NAN).min(axis=2)
        planes = [largest, np.where(finite == NAN, 0, finite).astype(np.uint16)]
    else:
        planes = [codes]
    raw = b"".join(part.astype(np.uint8).tobytes() for plane in planes for part in (plane >> 8, plane & 255))
    return base64.b64encode(zlib.compress(raw, 6)).decode("ascii"), group == 1
