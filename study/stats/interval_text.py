"""Losses, differences and intervals as text."""

from __future__ import annotations

import math
from collections.abc import Callable

from study.stats.statistics import Interval, perplexity_percent


def perplexity(loss: float) -> str:
    """exp(loss) with as many digits as are readable."""
    value = math.exp(min(loss, 700.0))
    if value >= 1e6:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def percent(difference: float) -> str:
    """A difference of losses as the change of perplexity, with its sign."""
    value = perplexity_percent(difference)
    if abs(value) >= 1000:
        return f"{value:+.1e} %"
    digits = 2 if abs(value) >= 0.1 else 3
    return f"{value if round(value, digits) else 0.0:+.{digits}f} %"


def with_interval(interval: Interval | None, text: Callable[[float], str]) -> str:
    """The estimate and its interval, each end as `text` writes it."""
    return "-" if interval is None else f"{text(interval.mean)}{ends(interval, text)}"


def ends(interval: Interval, text: Callable[[float], str]) -> str:
    """The interval in brackets, or that there is one seed."""
    if interval.low is None or interval.high is None:
        return " (one seed)"
    return f" [{text(interval.low)}, {text(interval.high)}]"
