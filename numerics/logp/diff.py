"""logp_diff: log-probabilities of rollout (sampling) against those of training, section 2.3.3.5.

For each sequence the mean over its response tokens of both sides, then the mean over sequences of rollout - training:

    logp_diff = mean_i( sum_t M_it (rollout_it - training_it) / sum_t M_it )

as verl's log_ppl_diff. Differences of both signs cancel in it, so the mean absolute difference is given with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numerics.errors import NumericsError

THRESHOLD = 0.01
OVER, CANCEL, WITHIN = "over the threshold", "differences of both signs cancel", "within the threshold"


@dataclass(frozen=True)
class TokenDiff:
    """One token. position: in the row of the arrays, from 0. response: its number among the response tokens, from 0."""

    sequence: int
    position: int
    response: int
    rollout: float
    training: float

    @property
    def difference(self) -> float:
        return self.rollout - self.training


@dataclass(frozen=True)
class SequenceDiff:
    """Mean, mean absolute and maximal absolute difference of one sequence, and its first token over the threshold."""

    tokens: int
    mean: float
    mean_absolute: float
    maximum: float
    first: TokenDiff | None


@dataclass(frozen=True)
class LogpDiff:
    """The result. per_token: rollout - training, 0 outside the mask. first_token: the mean difference of the first
    response tokens, which prefill computes; decode: of the later ones."""

    value: float
    mean_absolute: float
    threshold: float
    sequences: list[SequenceDiff]
    per_token: NDArray[np.float64]
    first_token: float
    decode: float

    @property
    def first(self) -> TokenDiff | None:
        """The first token over the threshold, of the first sequence that has one."""
        return next((one.first for one in self.sequences if one.first), None)

    @property
    def exceeds(self) -> bool:
        """Whether |logp_diff| is over the threshold, or no number."""
        return not abs(self.value) <= self.threshold

    @property
    def cancels(self) -> bool:
        """Whether only the mean absolute difference is over the threshold."""
        return not self.exceeds and not self.mean_absolute <= self.threshold

    @property
    def verdict(self) -> str:
        if self.exceeds:
            return OVER
        return CANCEL if self.cancels else WITHIN


def logp_diff(
    rollout: Any, training: Any, response_mask: Any = None, threshold: float = THRESHOLD
) -> LogpDiff:
    """Compare log-probabilities of tokens: arrays or tensors (sequences, tokens), or one sequence (tokens,).

    response_mask: nonzero for response tokens; without it all tokens count. NumericsError for unequal shapes and for a
    sequence without response tokens. A value that is not finite within the mask is over every threshold.
    """
    if not (isinstance(threshold, int | float) and math.isfinite(threshold) and threshold >= 0):
        raise NumericsError(f"the threshold is {threshold!r}; fix: give a number of at least 0")
    a, b = as_matrix(rollout, "rollout"), as_matrix(training, "training")
    mask = np.ones_like(a) if response_mask is None else as_matrix(response_mask, "response_mask")
    for name, other in (("training", b), ("response_mask", mask)):
        if other.shape != a.shape:
            raise NumericsError(
                f"rollout has shape {a.shape}, {name} has {other.shape}; fix: give the same sequences and tokens"
            )
    chosen = mask != 0
    if np.isnan(mask).any():
        raise NumericsError("response_mask has NaN; fix: give 0 or 1")
    if not a.size or not chosen.any(axis=1).all():
        empty = (
            "there are no sequences"
            if not a.size
            else f"sequence {int(np.argmin(chosen.any(axis=1)))} has none"
        )
        raise NumericsError(
            f"no response tokens to compare: {empty}; fix: leave it out, or correct response_mask"
        )
    with np.errstate(invalid="ignore", over="ignore"):
        per_token = np.where(chosen, np.where(chosen, a, 0) - np.where(chosen, b, 0), 0.0)
        sequences = [
            _sequence(
                number, a[number], b[number], per_token[number], np.flatnonzero(chosen[number]), threshold
            )
            for number in range(len(a))
        ]
        firsts = [row[np.flatnonzero(chosen[number])[0]] for number, row in enumerate(per_token)]
        later = [row[np.flatnonzero(chosen[number])[1:]] for number, row in enumerate(per_token)]
        decode = [float(part.mean()) for part in later if part.size]
        return LogpDiff(
            value=float(np.mean([one.mean for one in sequences])),
            mean_absolute=float(np.mean([one.mean_absolute for one in sequences])),
            threshold=threshold,
            sequences=sequences,
            per_token=per_token,
            first_token=float(np.mean(firsts)),
            decode=float(np.mean(decode)) if decode else 0.0,
        )


def _sequence(
    number: int,
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    row: NDArray[np.float64],
    places: NDArray[np.intp],
    threshold: float,
) -> SequenceDiff:
    size = np.abs(row[places])
    over = np.flatnonzero(~(size <= threshold))
    first = None
    if over.size:
        response = int(over[0])
        place = int(places[response])
        first = TokenDiff(number, place, response, float(a[place]), float(b[place]))
    return SequenceDiff(len(places), float(row[places].mean()), float(size.mean()), float(size.max()), first)


def as_matrix(value: Any, name: str) -> NDArray[np.float64]:
    """Return a matrix in float64. Tensors of any device and dtype are read."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise NumericsError(f"{name} is not an array of numbers; fix: give (sequences, tokens)") from error
    array = array[None] if array.ndim == 1 else array
    if array.ndim != 2:
        raise NumericsError(f"{name} has {array.ndim} dimensions; fix: give (sequences, tokens)")
    return array
