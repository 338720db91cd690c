"""Statistics of a part of a tensor, which join to those of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Moments:
    """Joined statistics of `count` elements. deviations: sum of squared deviations from the mean."""

    count: int = 0
    mean: float = 0.0
    deviations: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    nonzero: float = 0.0
    nan: float = 0.0
    inf: float = 0.0

    def joined(self, other: Moments) -> Moments:
        """Return the statistics of both."""
        if not self.count:
            return other
        count = self.count + other.count
        step = other.mean - self.mean
        weight = other.count / count
        return Moments(
            count,
            self.mean + step * weight,
            self.deviations + other.deviations + step * step * self.count * weight,
            _least(self.low, other.low),
            -_least(-self.high, -other.high),
            self.nonzero + other.nonzero,
            self.nan + other.nan,
            self.inf + other.inf,
        )

    def statistic(self, name: str) -> float:
        """Return a column of numerics.monitor.tables.STATISTICS. An empty tensor has nan."""
        if not self.count:
            return 0.0 if name in ("nan", "inf") else math.nan
        if name in ("nan", "inf"):
            return float(getattr(self, name))
        if name == "zeros":
            return 1.0 - self.nonzero / self.count
        if self.nan:
            return math.nan
        if name in ("min", "max"):
            return self.low if name == "min" else self.high
        if name == "mean":
            if self.inf:
                return self.low + self.high  # nan of both infinities
            return self.mean
        if name == "norm":
            return math.inf if self.inf else math.sqrt(self.deviations + self.count * self.mean**2)
        return math.nan if self.inf else math.sqrt(max(self.deviations, 0.0) / self.count)


def _least(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else min(one, other)
