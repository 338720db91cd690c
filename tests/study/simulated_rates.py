"""Simulated studies that tune learning rates: how often a control arm wins or loses by tuning.

The loss of a run is that of its rate plus noise of one unit; the shift that all runs of a seed share drops out of the
differences. All losses are in units of the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scripts.dev.simulate_verdicts import Judged, Values, judge_all


@dataclass(frozen=True)
class Arms:
    """Losses of many studies. controls: means of the control arms. shape: study, rate, seed."""

    controls_tuning: Values
    variant_tuning: Values
    controls: Values
    variant: Values


def draw_arms(
    draw: np.random.Generator,
    studies: int,
    design: tuple[int, int, int],
    curve: Values,
    effect: Values | float = 0.0,
) -> Arms:
    """Draw tuning and judged losses. curve: of the control arms by rate. effect: of the variant, by rate."""
    arms, tuning, seeds = design
    level = curve[None, :, None]

    def losses(shift: Values, spread: float, number: int) -> Values:
        found: Values = shift + spread * draw.normal(size=(studies, curve.size, number))
        return found

    moved = level + np.broadcast_to(effect, curve.shape)[None, :, None]
    share = 1 / math.sqrt(arms)
    return Arms(
        losses(level, share, tuning),
        losses(moved, 1, tuning),
        losses(level, share, seeds),
        losses(moved, 1, seeds),
    )


def best_rates(tuning: Values) -> NDArray[np.intp]:
    """Return the rate of each study: the lowest mean loss over the tuning seeds."""
    found: NDArray[np.intp] = tuning.mean(axis=2).argmin(axis=1)
    return found


def apply_rule(arms: Arms) -> NDArray[np.int_]:
    """Choose the rates on the tuning seeds, and judge each study on the others: +1 better, -1 worse, 0 neither."""
    own, shared = best_rates(arms.variant_tuning), best_rates(arms.controls_tuning)
    at_best = called(at(arms.variant, own) - at(arms.controls, shared))
    same = called(at(arms.variant, own) - at(arms.controls, own))
    common = called(at(arms.variant, shared) - at(arms.controls, shared))
    confirmed = ((at_best == 1) & (same == 1)) | ((at_best == -1) & (common == -1))
    found: NDArray[np.int_] = np.where(confirmed, at_best, 0)
    return found


def at(values: Values, rates: NDArray[np.intp]) -> Values:
    """Return the losses (study, seed) of each study at its rate."""
    found: Values = values[np.arange(values.shape[0]), rates]
    return found


def called(differences: Values) -> NDArray[np.int_]:
    """Return +1 where the rule of study.analysis.verdict.judge calls the variant better, -1 for worse, else 0."""
    judged: Judged = judge_all(differences, (differences.shape[1],))
    found: NDArray[np.int_] = np.where(judged.called, -np.sign(judged.mean), 0).astype(int)
    return found


def valley(rates: int, depth: float) -> Values:
    """Return a curve of loss over rates: 0 at the middle rate, `depth` more for each rate beside it."""
    found: Values = depth * np.abs(np.arange(rates) - rates // 2.0)
    return found
