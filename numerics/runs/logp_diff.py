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
FLOAT32 = 2.0**-24  # the rounding of a number, relative to it


@dataclass(frozen=True)
class TokenDiff:
    """One token with its log-probabilities."""

    sequence: int
    position: int  # in the row of the arrays, from 0
    response: int  # its number among the response tokens, from 0
    rollout: float
    training: float


@dataclass(frozen=True)
class SequenceDiff:
    """The differences of one sequence, rollout - training."""

    tokens: int
    mean: float
    mean_absolute: float
    maximum: float  # of the absolute differences
    units: float  # the largest difference, in roundings of the log-probability in float32
    first: TokenDiff | None  # over the threshold


@dataclass(frozen=True)
class LogpDiff:
    """The result of a comparison."""

    value: float  # logp_diff
    mean_absolute: float
    threshold: float
    sequences: list[SequenceDiff]
    per_token: NDArray[np.float64]  # rollout - training, 0 outside the mask
    first_token: float  # mean absolute difference of the first response tokens, which prefill computes
    decode: float  # of the later ones; 0 where there are none

    @property
    def first(self) -> TokenDiff | None:
        """The first token over the threshold, of the first sequence that has one."""
        return next((one.first for one in self.sequences if one.first), None)

    @property
    def exceeds(self) -> bool:
        """Whether |logp_diff| is over the threshold, or no number."""
        return not abs(self.value) <= self.threshold

    @property
    def prefill_over(self) -> int:
        """Return how many sequences are over the threshold at their first response token."""
        return sum(one.first is not None and one.first.response == 0 for one in self.sequences)

    @property
    def verdict(self) -> str:
        if self.exceeds:
            return OVER
        return WITHIN if self.mean_absolute <= self.threshold else CANCEL


def logp_diff(
    rollout: Any, training: Any, response_mask: Any = None, threshold: float = THRESHOLD
) -> LogpDiff:
    """Compare log-probabilities of tokens: arrays or tensors (sequences, tokens), or one sequence (tokens,).

    response_mask: nonzero for response tokens; without it all tokens count. NumericsError for unequal shapes and for a
    sequence without response tokens. A value that is not finite within the mask is over every threshold.
    """
    if not (isinstance(threshold, int | float) and math.isfinite(threshold) and threshold >= 0):
        raise NumericsError(f"the threshold is {threshold!r}; fix: give a number of at least 0")
    a, b = _matrix(rollout, "rollout"), _matrix(training, "training")
    mask = np.ones_like(a) if response_mask is None else _matrix(response_mask, "response_mask")
    for name, other in (("training", b), ("response_mask", mask)):
        if other.shape != a.shape:
            raise NumericsError(
                f"rollout has shape {a.shape}, {name} has {other.shape}; fix: give the same sequences and tokens"
            )
    if np.isnan(mask).any():
        raise NumericsError("response_mask has NaN; fix: give 0 or 1")
    chosen = mask != 0
    empty = np.flatnonzero(~chosen.any(axis=1))
    if not a.size or empty.size:
        which = f"sequence {empty[0]} has none" if a.size else "there are no sequences"
        raise NumericsError(
            f"no response tokens to compare: {which}; fix: leave it out, or correct response_mask"
        )
    with np.errstate(invalid="ignore", over="ignore"):
        per_token = np.where(chosen, np.where(chosen, a, 0) - np.where(chosen, b, 0), 0.0)
        size = np.abs(per_token)
        places = [np.flatnonzero(row) for row in chosen]
        sequences = []
        for number, where in enumerate(places):
            part, first = size[number, where], None
            over = np.flatnonzero(~(part <= threshold))
            if over.size:
                response, place = int(over[0]), int(where[over[0]])
                values = float(a[number, place]), float(b[number, place])
                first = TokenDiff(number, place, response, *values)
            means = float(per_token[number, where].mean()), float(part.mean())
            units = part / (FLOAT32 * np.maximum(1, np.abs(b[number, where])))
            sequences.append(SequenceDiff(len(where), *means, float(part.max()), float(units.max()), first))
        later = [size[number, where[1:]].mean() for number, where in enumerate(places) if len(where) > 1]
        return LogpDiff(
            value=float(np.mean([one.mean for one in sequences])),
            mean_absolute=float(np.mean([one.mean_absolute for one in sequences])),
            threshold=threshold,
            sequences=sequences,
            per_token=per_token,
            first_token=float(np.mean([size[number, where[0]] for number, where in enumerate(places)])),
            decode=float(np.mean(later)) if later else 0.0,
        )


def _matrix(value: Any, name: str) -> NDArray[np.float64]:
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
