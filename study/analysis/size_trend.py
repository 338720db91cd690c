"""The trend of a judged arm's difference over model sizes: a linear contrast over log parameters. Needs no torch.

The effects of the sizes are independent estimates with variances of their own, so the contrast has the degrees of
freedom of Welch and Satterthwaite. Where a seed shares its batches among the sizes, the effects are correlated
positively if at all. The contrast then varies less than assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from referee.verdict.looks import adjusted_for_looks
from referee.verdict.statistics import Interval, holm, mean, t_quantile, t_tail
from study.analysis.verdict import (
    BETTER,
    CANNOT_TELL,
    EXPLORATORY,
    INTERIM,
    LEVEL,
    VERDICT_SEEDS,
    WORSE,
    Verdict,
)

HOLDS = "holds"
SHRINKS = "shrinks"
GROWS = "grows"

RULE = (
    "An effect shrinks or grows if the linear contrast over log parameters differs from zero at 5 %, toward zero or "
    "away from it; without such a contrast it holds if it is called better at every size or worse at every size. "
    "Otherwise the study cannot tell."
)


@dataclass(frozen=True)
class Contrast:
    """Change of a difference (nats) per tenfold parameters, with its interval. dof: Welch-Satterthwaite."""

    slope: Interval
    dof: float
    p_value: float


def contrast(parameters: Sequence[int], effects: Sequence[Verdict]) -> Contrast | None:
    """Return the least-squares slope of the effects over log10 parameters.

    None with under two distinct sizes, or under VERDICT_SEEDS seeds at one of them.
    """
    if len(set(parameters)) < 2 or min(one.seeds for one in effects) < VERDICT_SEEDS:
        return None
    places = [math.log10(count) for count in parameters]
    centre = mean(places)
    scale = math.fsum((place - centre) ** 2 for place in places)
    weights = [(place - centre) / scale for place in places]
    slope = math.fsum(w * one.test.difference.mean for w, one in zip(weights, effects, strict=True))
    parts = [(w * (one.test.spread or 0.0)) ** 2 / one.seeds for w, one in zip(weights, effects, strict=True)]
    variance = math.fsum(parts)
    if variance <= 0:
        return Contrast(Interval(slope, slope, slope, len(effects)), 1.0, float(slope == 0))
    rests = [part**2 / (one.seeds - 1) for part, one in zip(parts, effects, strict=True)]
    dof = variance**2 / math.fsum(rests)
    error = math.sqrt(variance)
    half = t_quantile(1 - min(one.level for one in effects), dof) * error
    interval = Interval(slope, slope - half, slope + half, len(effects))
    return Contrast(interval, dof, min(1.0, 2 * t_tail(abs(slope) / error, dof)))


@dataclass(frozen=True)
class SizeTrend:
    """A judged arm over the sizes. effects: its verdict at each size, None where it has none.

    word: HOLDS, SHRINKS, GROWS or CANNOT_TELL. adjusted_p: of the contrast, for looks and by Holm's method over the
    exploratory arms; None without a contrast.
    """

    arm: str
    role: str
    effects: list[Verdict | None]
    contrast: Contrast | None
    adjusted_p: float | None
    word: str = CANNOT_TELL


def trends(parameters: Sequence[int], by_size: Sequence[Sequence[Verdict]]) -> list[SizeTrend]:
    """Judge the trend of every arm. parameters: of each size; by_size: the verdicts at each size."""
    tables = [{one.variant: one for one in verdicts} for verdicts in by_size]
    found = [_tested(name, parameters, [table.get(name) for table in tables]) for name in _names(tables)]
    family = [one for one in found if one.role == EXPLORATORY and one.adjusted_p is not None]
    adjusted = holm([one.adjusted_p for one in family if one.adjusted_p is not None])
    by_arm = {one.arm: p for one, p in zip(family, adjusted, strict=True)}
    return [_named(replace(one, adjusted_p=by_arm.get(one.arm, one.adjusted_p))) for one in found]


def _names(tables: Sequence[dict[str, Verdict]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _tested(name: str, parameters: Sequence[int], effects: list[Verdict | None]) -> SizeTrend:
    known = [one for one in effects if one is not None]
    complete = len(known) == len(effects) and all(one.word != INTERIM for one in known)
    found = contrast(parameters, known) if complete else None
    role = known[0].role
    if found is None:
        return SizeTrend(name, role, effects, None, None)
    strictest = min(known, key=lambda one: one.level)
    return SizeTrend(name, role, effects, found, adjusted_for_looks(found.p_value, strictest.reads))


def _named(trend: SizeTrend) -> SizeTrend:
    """Choose the word. Toward zero is judged from the side of the mean effect over the sizes."""
    known = [one for one in trend.effects if one is not None]
    if trend.contrast is None or trend.adjusted_p is None:
        return trend
    if trend.adjusted_p < LEVEL:
        side = mean([one.test.difference.mean for one in known])
        return replace(trend, word=SHRINKS if trend.contrast.slope.mean * side < 0 else GROWS)
    words = {one.word for one in known}
    return replace(trend, word=HOLDS) if words in ({BETTER}, {WORSE}) else trend
