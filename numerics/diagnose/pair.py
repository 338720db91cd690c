"""Two curves at their common steps: alignment of step numbers, differences, and what rounding explains."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from numerics.diagnose.loss_files import Curve, LossCurve
from numerics.errors import NumericsError

Floats = NDArray[np.float64]
LOSS, NORM = "loss", "gradient norm"
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}
# Growth of a difference within one step that rounding explains. Measured between correct kernels: 4.3 where training is
# stable; 15 (loss) and 99 (gradient norm) with a learning rate ten times too large (docs/numerics.md).
GROWTH = {LOSS: 16.0, NORM: 256.0}
CLEARER = 10.0  # times closer must the curves be for a shift of their step numbers
LARGEST = 1e100  # relative difference; means of it are finite
DIGITS = 500  # values that show how many digits the file has


@dataclass(frozen=True)
class DifferingValue:
    """A value that differs. what: LOSS or NORM. relative: the difference, infinite where one is not a number."""

    step: int
    what: str
    first: float
    second: float
    relative: float


@dataclass(frozen=True)
class CurvePair:
    """Two curves and their common steps. offset: added to the steps of the second curve."""

    first: LossCurve
    second: LossCurve
    steps: NDArray[np.int64]
    epsilon: float = EPSILON["float32"]
    offset: int = 0
    notes: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[LossCurve, LossCurve]:
        return self.first, self.second

    def losses(self, side: int) -> Floats:
        return np.array([self.sides[side].losses[step] for step in self.steps.tolist()])

    def differences(self, what: str = LOSS) -> dict[int, float]:
        """Return step -> |first - second| / |first|, where both are finite.

        Of losses around zero the divisor is at least their median size.
        """
        return {place.step: place.relative for place in self.places if place.what == what and _finite(place)}

    @functools.cached_property
    def places(self) -> list[DifferingValue]:
        """Every common value in the order of computation: the loss of a step, then its gradient norm."""
        found = []
        norms = [side.gradient_norms for side in self.sides]
        losses = [loss for loss in self.first.losses.values() if math.isfinite(loss)]
        has_both_signs = losses and min(losses) < 0 < max(losses)  # of a policy gradient
        floor = float(np.median(np.abs(losses))) if has_both_signs else 0.0
        for step in self.steps.tolist():
            found.append(_place(step, LOSS, self.first.losses[step], self.second.losses[step], floor))
            if step in norms[0] and step in norms[1]:
                found.append(_place(step, NORM, norms[0][step], norms[1][step]))
        return found

    def first_unequal(self) -> DifferingValue | None:
        """Return the first value that is not equal to the last bit, or the last digit of the file."""
        return next((place for place in self.places if place.relative), None)

    def first_beyond_rounding(self) -> DifferingValue | None:
        """Return the first value that differs by more than rounding and its growth explain.

        Explained: GROWTH^g x (epsilon + the largest difference before), for g steps since the last common one; and
        one unit of the last digit in the file.
        """
        return next((place for place, explained in self.explained() if place.relative > explained), None)

    def explained(self) -> Iterator[tuple[DifferingValue, float]]:
        """Yield every common value and the relative difference that rounding explains."""
        largest, last = 0.0, self.steps[0] - 1 if len(self.steps) else 0
        quantum = {
            LOSS: _quantum([side.losses for side in self.sides]),
            NORM: _quantum([side.gradient_norms for side in self.sides]),
        }
        for place in self.places:
            gap = max(1, place.step - last)
            growth = math.exp(min(700.0, gap * math.log(GROWTH[place.what])))
            size = abs(place.first) if math.isfinite(place.first) else math.inf
            digits = 1.01 * quantum[place.what] / max(size, 1e-300)
            yield place, growth * (self.epsilon + largest) + digits
            if math.isfinite(place.relative):
                largest = max(largest, place.relative)
            last = place.step


def pair_curves(
    first: LossCurve, second: LossCurve, offset: int | None = None, epsilon: float = EPSILON["float32"]
) -> CurvePair:
    """Pair two curves. NumericsError without a common step.

    offset: to add to the steps of the second curve. By default it is 0, or 1 or -1 where one trainer counts steps from
    0 and the other from 1: where the curves are far closer so.
    """
    notes = []
    if not (first.numbered and second.numbered) and len(first.losses) == len(second.losses):
        first, second = _renumbered(first, second), _renumbered(second, first)
    for curve in (first, second):
        if not curve.numbered and len(first.losses) != len(second.losses):
            notes.append(
                f"{curve.name} has no step numbers: its lines count as steps 1 to {len(curve.losses)}"
            )
    if offset is None:
        offset = _best_offset(first, second)
        if offset:
            notes.append(
                f"the steps of {second.name} are shifted by {offset:+d}, where the curves agree best"
            )
    second = second.shifted(offset) if offset else second
    steps = np.array(sorted(first.losses.keys() & second.losses.keys()), dtype=np.int64)
    if not len(steps):
        ranges = [f"{side.steps[0]} to {side.steps[-1]}" for side in (first, second)]
        raise NumericsError(
            f"the curves have no common step: {ranges[0]} against {ranges[1]}; fix: log both at the same steps, "
            "or give --offset"
        )
    notes += _overlap(first, second, steps)
    return CurvePair(first, second, steps, epsilon, offset, tuple(notes))


def _renumbered(curve: LossCurve, other: LossCurve) -> LossCurve:
    """Give the values of a curve without step numbers the steps of the other."""
    if curve.numbered or not other.numbered:
        return curve
    steps = dict(zip(curve.losses, other.losses, strict=True))
    norms = {steps[step]: value for step, value in curve.gradient_norms.items()}
    losses = {steps[step]: value for step, value in curve.losses.items()}
    return replace(curve, losses=losses, gradient_norms=norms, numbered=True)


def _best_offset(first: LossCurve, second: LossCurve) -> int:
    distances = {offset: _distance(first, second.shifted(offset)) for offset in (0, 1, -1)}
    best = min(distances, key=lambda offset: distances[offset])
    return best if CLEARER * distances[best] < distances[0] else 0


def _distance(first: LossCurve, second: LossCurve) -> float:
    """Return the median relative difference at the first common steps; infinite without three of them."""
    steps = sorted(first.losses.keys() & second.losses.keys())[:100]
    found = [_place(step, LOSS, first.losses[step], second.losses[step]).relative for step in steps]
    enough = len(found) > 2 or (found and first.losses.keys() == second.losses.keys())
    return float(np.median(found)) if enough else math.inf


def _overlap(first: LossCurve, second: LossCurve, steps: NDArray[np.int64]) -> list[str]:
    if len(first.losses) == len(second.losses) == len(steps):
        return []
    counts = f"{len(first.losses)} and {len(second.losses)}"
    return [f"{len(steps)} common steps, {steps[0]} to {steps[-1]}, of {counts} logged ones"]


def _place(step: int, what: str, one: float, other: float, floor: float = 0.0) -> DifferingValue:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return DifferingValue(step, what, one, other, 0.0)
    if not (math.isfinite(one) and math.isfinite(other)):
        return DifferingValue(step, what, one, other, math.inf)
    size = max(abs(one), floor, 1e-300)
    return DifferingValue(step, what, one, other, min(abs(one - other) / size, LARGEST))


def _finite(place: DifferingValue) -> bool:
    return math.isfinite(place.first) and math.isfinite(place.second)


def _quantum(curves: Sequence[Curve]) -> float:
    """Return the unit of the last printed digit; 0 for values of full precision."""
    units = [_unit(list(curve.values())[:DIGITS]) for curve in curves if curve]
    return max(units, default=0.0)


def _unit(values: Sequence[float]) -> float:
    texts = [f"{value:.15g}" for value in values if math.isfinite(value)]
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    full = not decimals or any("e" in text or len(text) > 14 for text in texts)
    return 0.0 if full else 10.0**-decimals
