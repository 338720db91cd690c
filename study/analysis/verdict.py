"""Real changes against the equivalent arms: what a table of losses allows one to say of each. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ra.names import is_control_arm
from study.analysis.allowance import NO_ALLOWANCE, Allowance, Allowances
from study.analysis.evidence import Losses
from study.stats.statistics import CONFIDENCE, AgainstFloor, Interval, against_floor, holm, noise_floor

MATTERS = 0.1  # of half an interval: an allowance that is worth words


@dataclass
class Judged:
    """A variant that is a real change, against the mean of the equivalent arms at the same seeds."""

    variant: str
    result: AgainstFloor
    adjusted_p: float  # Holm's, over the variants judged together
    judged_together: int
    allowance: Allowance = NO_ALLOWANCE  # of the difference; adjusted_p is of what it leaves

    def allowed(self, interval: Interval) -> Interval:
        """The interval with room for all that the allowance may be worth."""
        if self.allowance.move is None:
            return Interval(interval.mean, -math.inf, math.inf, interval.count)
        return interval.reaching(self.allowance.move)

    @property
    def beyond_noise(self) -> bool:
        """Whether more may be said than "cannot tell"; of a variant that varies more, by its own spread as well."""
        apart = all(self.allowed(interval).contains_zero is False for interval in self._tests)
        return apart and self.adjusted_p < 1 - CONFIDENCE

    @property
    def allowance_matters(self) -> bool:
        """Whether it moves a bound visibly, or decides."""
        difference, move = self.result.difference, self.allowance.move
        if move is None or difference.low is None:
            return False
        return self.is_owed or abs(move) > MATTERS * (difference.mean - difference.low)

    @property
    def is_owed(self) -> bool:
        """Whether it is the allowance that stands between the variant and a verdict."""
        apart = all(interval.contains_zero is False for interval in self._tests)
        return apart and any(self.allowed(interval).contains_zero for interval in self._tests)

    @property
    def _tests(self) -> list[Interval]:
        return [self.result.difference, *([self.result.own] if self.result.varies_more else [])]


def arms_of(table: Losses, seeds: list[int] | None = None) -> list[list[float]]:
    """The losses of the equivalent arms at each of the seeds (all by default).

    Arms that agree to the last bit are one arm under two names (RALATE and RAALT on two layers): counted once, so
    that they do not make the noise look smaller.
    """
    if seeds is None:
        seeds = sorted({seed for own in table.values() for seed in own})
    arms = {name: own for name, own in table.items() if is_control_arm(name)}
    return [list(dict.fromkeys(own[seed] for own in arms.values() if seed in own)) for seed in seeds]


def fewest_arms(table: Losses) -> list[int]:
    """How many arms each seed has, at the seeds of the real change that has the fewest; of all where there is none."""
    changes = [list(own) for name, own in table.items() if not is_control_arm(name)]
    at_seeds = [arms_of(table, seeds) for seeds in changes] or [arms_of(table)]
    counts = [[len(arms) for arms in found if arms] for found in at_seeds]
    return min((found for found in counts if found), key=len, default=[])


def judge(table: Losses, allowances: Allowances) -> list[Judged]:
    """Every real change that has arms. p-values are adjusted over those of which the allowance is known."""
    floor = noise_floor(arms_of(table))
    allowed = {name: allowances.get(name, NO_ALLOWANCE) for name in table if not is_control_arm(name)}
    results: dict[str, AgainstFloor] = {}
    for name, allowance in allowed.items():
        own = table[name]
        pairs = list(zip(own.values(), arms_of(table, list(own)), strict=True))
        result = against_floor(pairs, floor, allowance.move or 0.0) if floor else None
        if result:
            results[name] = result
    known = [name for name in results if allowed[name].move is not None]
    adjusted = dict(zip(known, holm([results[name].p_value for name in known]), strict=True))
    return [
        Judged(name, result, adjusted.get(name, 1.0), len(known), allowed[name])
        for name, result in results.items()
    ]


def widest(judged: list[Judged]) -> tuple[str, float] | None:
    """The variant that was seen to vary most beyond the arms, and its spread over seeds in nats."""
    found = [(seen.result.spread or 0.0, seen.variant) for seen in judged if seen.result.varies_more]
    return (max(found)[1], max(found)[0]) if found else None
