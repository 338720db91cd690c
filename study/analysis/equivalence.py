"""Control arms: B and the fixed patterns, which are one function class, so that they differ by chance alone (A/A runs).

Their spread, the noise floor, is a diagnostic: it checks the pipeline and plans seeds. The verdict does not use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ra.names import is_control_arm
from referee.verdict.statistics import (
    CONFIDENCE,
    NoiseFloor,
    VarianceRatio,
    controls_error,
    holm,
    mean,
    paired_t,
    t_quantile,
    variance_ratio,
)

SQUARE = ("B", "RAEARLY", "RALATE", "RAALL")  # the first half of the layers swapped or not, and the second
# Of SQUARE: the effects of swapping the first half and the second, and the effect that only both have.
CONTRASTS = ((-0.5, 0.5, -0.5, 0.5), (-0.5, -0.5, 0.5, 0.5), (0.5, -0.5, -0.5, 0.5))
ENOUGH_DOF = 3  # of either variance, below which their ratio says nothing
ENOUGH_SEEDS = 3  # of a control arm, below which it is not checked

Losses = Mapping[str, Mapping[int, float]]  # variant -> seed -> loss in nats


def control_losses(table: Losses, seeds: Sequence[int] | None = None) -> list[list[float]]:
    """Return the losses of the control arms at each of the seeds (default: all).

    Arms that agree to the last bit are one arm under two names (RALATE and RAALT on two layers) and count once.
    """
    if seeds is None:
        seeds = sorted({seed for by_seed in table.values() for seed in by_seed})
    arms = [by_seed for name, by_seed in table.items() if is_control_arm(name)]
    return [list(dict.fromkeys(by_seed[seed] for by_seed in arms if seed in by_seed)) for seed in seeds]


def noise_band(floor: NoiseFloor, controls: Sequence[int]) -> float:
    """Return half the width (nats) of the band that holds a variant without effect in 95 % of studies.

    controls: the number of control arms at each seed. The variant varies like a control arm and is none of them.
    """
    return t_quantile(CONFIDENCE, floor.dof) * controls_error(floor.sigma, controls)


def odd_controls(table: Losses) -> list[str]:
    """Return the control arms that differ from the mean of the others at 5 % (paired t over seeds, Holm).

    They cannot differ by more than chance, so such an arm points to an error in the pipeline.
    """
    tested: dict[str, float] = {}
    for name in (name for name in table if is_control_arm(name)):
        others = {other: by_seed for other, by_seed in table.items() if other != name}
        pairs = zip(table[name].values(), control_losses(others, list(table[name])), strict=True)
        differences = [loss - mean(arms) for loss, arms in pairs if arms]
        if len(differences) >= ENOUGH_SEEDS:
            tested[name] = paired_t(differences).p_value or 0.0
    adjusted = holm(list(tested.values()))
    return [name for name, p in zip(tested, adjusted, strict=True) if p < 1 - CONFIDENCE]


@dataclass(frozen=True)
class VarianceCheck:
    """F tests whether the control arms vary independently and alike; `enough` data to decide.

    halves: spread of the effects of swapping either half alone. together: of the effect that only both halves have.
    early, late: of the effects of each half. All four are equal if the arms vary independently and alike.
    tests: halves over together, and early over late; empty without spread. adjusted_p: by Holm's method.
    """

    halves: NoiseFloor | None
    together: NoiseFloor | None
    early: NoiseFloor | None
    late: NoiseFloor | None
    tests: tuple[VarianceRatio, ...]
    adjusted_p: tuple[float, ...]
    enough: bool

    @property
    def differs(self) -> bool:
        """Whether an F test finds that the arms vary differently, or not independently."""
        return self.enough and min(self.adjusted_p) < 1 - CONFIDENCE


def variance_check(final: Losses) -> VarianceCheck | None:
    """Compare the variances of half-swapped and fully swapped arms; None in a study without all four of SQUARE.

    Swapping no half, the first, the second or both is a 2 x 2 design. Its three contrasts, each scaled to the variance
    of a single run, are independent and of one variance if the four arms vary independently and alike. Arms that agree
    in pairs (B with RALATE, RAEARLY with RAALL) make one half's effect larger than the other's.
    """
    if not set(SQUARE) <= set(final):
        return None
    seeds = sorted(set.intersection(*(set(final[name]) for name in SQUARE)))
    if not seeds:
        return VarianceCheck(None, None, None, None, (), (), False)
    contrasts = np.array([[final[name][seed] for name in SQUARE] for seed in seeds]) @ np.transpose(CONTRASTS)
    parts = (contrasts[:, :2], contrasts[:, 2:], contrasts[:, 0], contrasts[:, 1])
    halves, together, early, late = (NoiseFloor(math.sqrt(np.mean(part**2)), part.size) for part in parts)
    tests = tuple(filter(None, [variance_ratio(halves, together), variance_ratio(early, late)]))
    adjusted = tuple(holm([test.p_value for test in tests]))
    enough = len(tests) == 2 and len(seeds) >= ENOUGH_DOF
    return VarianceCheck(halves, together, early, late, tests, adjusted, enough)
