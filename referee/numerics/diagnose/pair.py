"""Two curves at their common steps: alignment of step numbers, differences, and what rounding explains."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from referee.errors import NumericsError
from referee.verdict.loss_files import Curve, LossCurve

LOSS, NORM = "loss", "gradient norm"
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}
# Growth of a difference within one step that rounding explains. Measured between correct kernels: 4.3 where training is
# stable; 15 (loss) and 99 (gradient norm) with a learning rate ten times too large (docs/diagnose.md).
GROWTH = {LOSS: 16.0, NORM: 256.0}
CLEARER = 10.0  # times closer must the curves be for a shift of their step numbers
LARGEST = 1e100  # relative difference; means of it are finite
DIGITS = 500  # values that show how many digits the file has


@dataclass(frozen=True)
class DifferingValue:
    """A common value of both curves."""

    step: int
    what: str  # LOSS or NORM
    first: float
    second: float
    relative: float  # the difference; 0 where both are equal, infinite where one is not a number


@dataclass(frozen=True)
class CurvePair:
    """Two curves and their common steps."""

    first: LossCurve
    second: LossCurve
    steps: list[int]
    epsilon: float = EPSILON["float32"]
    offset: int = 0  # added to the steps of the second curve
    notes: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[LossCurve, LossCurve]:
        return self.first, self.second

    def differences(self) -> dict[int, float]:
        """Return step -> |first - second| / |first| of the loss, where both are finite."""
        return {
            place.step: place.relative
            for place in self.places
            if place.what == LOSS and math.isfinite(place.first) and math.isfinite(place.second)
        }

    @functools.cached_property
    def places(self) -> list[DifferingValue]:
        """Every common value in the order of computation: the loss of a step, then its gradient norm.

        The divisor of losses around zero, as of a policy gradient, is at least their median size.
        """
        found = []
        norms = [side.gradient_norms for side in self.sides]
        losses = [loss for loss in self.first.losses.values() if math.isfinite(loss)]
        has_both_signs = losses and min(losses) < 0 < max(losses)
        floor = float(np.median(np.abs(losses))) if has_both_signs else 0.0
        for step in self.steps:
            found.append(_place(step, LOSS, self.first.losses[step], self.second.losses[step], floor))
            if step in norms[0] and step in norms[1]:
                found.append(_place(step, NORM, norms[0][step], norms[1][step]))
        return found

    def first_unequal(self) -> DifferingValue | None:
        """Return the first value that is not equal to the last bit, or the last digit of the file."""
        return next((place for place in self.places if place.relative), None)

    def first_beyond_rounding(self) -> DifferingValue | None:
        """Return the first value that differs by more than rounding and its growth explain."""
        return next((place for place, explained in self.explained() if place.relative > explained), None)

    def explained(self) -> Iterator[tuple[DifferingValue, float]]:
        """Yield every common value and the relative difference that rounding explains.

        It is GROWTH^g x (epsilon + the largest difference before), for g steps since the last common one, and one unit
        of the last digit in the file.
        """
        largest, last = 0.0, self.steps[0] - 1
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
    counts = [len(side.losses) for side in (first, second)]
    notes = [
        f"{side.name} has no step numbers: its lines count as steps 1 to {len(side.losses)}"
        for side in (first, second)
        if not side.numbered and counts[0] != counts[1]
    ]
    if offset is None:
        distances = {shift: _distance(first, second.shifted(shift)) for shift in (0, 1, -1)}
        best = min(distances, key=lambda shift: distances[shift])
        offset = best if CLEARER * distances[best] < distances[0] else 0
        if offset:
            notes.append(
                f"the steps of {second.name} are shifted by {offset:+d}, where the curves agree best"
            )
    second = second.shifted(offset) if offset else second
    steps = sorted(first.losses.keys() & second.losses.keys())
    if not steps:
        ranges = [f"{side.steps[0]} to {side.steps[-1]}" for side in (first, second)]
        raise NumericsError(
            f"the curves have no common step: {ranges[0]} against {ranges[1]}; fix: log both at the same steps, "
            "or give --offset"
        )
    if {*counts} != {len(steps)}:
        notes.append(
            f"{len(steps)} common steps, {steps[0]} to {steps[-1]}, of {counts[0]} and {counts[1]} logged ones"
        )
    return CurvePair(first, second, steps, epsilon, offset, tuple(notes))


def _distance(first: LossCurve, second: LossCurve) -> float:
    """Return the median relative difference at the first common steps; infinite without three of them."""
    steps = sorted(first.losses.keys() & second.losses.keys())[:100]
    found = [_place(step, LOSS, first.losses[step], second.losses[step]).relative for step in steps]
    enough = len(found) > 2 or (found and first.losses.keys() == second.losses.keys())
    return float(np.median(found)) if enough else math.inf


def _place(step: int, what: str, first: float, second: float, floor: float = 0.0) -> DifferingValue:
    if first == second or (math.isnan(first) and math.isnan(second)):
        return DifferingValue(step, what, first, second, 0.0)
    if not (math.isfinite(first) and math.isfinite(second)):
        return DifferingValue(step, what, first, second, math.inf)
    size = max(abs(first), floor, 1e-300)
    return DifferingValue(step, what, first, second, min(abs(first - second) / size, LARGEST))


def _quantum(curves: Sequence[Curve]) -> float:
    """Return the unit of the last printed digit; 0 for values of full precision."""
    return max((_unit(list(curve.values())[:DIGITS]) for curve in curves), default=0.0)


def _unit(values: Sequence[float]) -> float:
    texts = [f"{value:.15g}" for value in values if math.isfinite(value)]
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    full = not decimals or any("e" in text or len(text) > 14 for text in texts)
    return 0.0 if full else 10.0**-decimals
