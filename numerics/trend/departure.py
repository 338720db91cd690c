"""Where two runs first differ at all, however little: the first value that is not the same in both files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numerics.trend.anomalies import aligned, compared
from numerics.trend.tables import Monitored, computation_order, kind_order


@dataclass(frozen=True)
class Departure:
    """The first value of a statistic that differs, in the order of computation. expected: the reference's.

    relative: their distance over the larger magnitude; None where one is not finite.
    """

    step: int
    kind: str
    name: str
    rank: int
    statistic: str
    value: float
    expected: float
    relative: float | None


@dataclass(frozen=True)
class Departures:
    """values: compared ones of the tables. losses: compared ones; loss_step: the first that differs, by `loss`."""

    values: int
    first: Departure | None
    losses: int
    loss_step: int | None
    loss: float | None


def find_departures(run: Monitored, reference: Monitored) -> Departures:
    """Compare every statistic of two runs, and their losses, for equality."""
    count = 0
    found: list[tuple[tuple[int, int, int, int], Departure]] = []
    for table in run.tables.values():
        places = computation_order(run, table)
        for word, values in table.values.items():
            base = compared(table, word, reference)
            other = reference.tables.get((table.kind, table.rank))
            if base is None or other is None:
                continue
            common = table.present & ~np.isnan(aligned(other, np.ones_like(other.values[word]), table))
            count += int(common.sum())
            differs = common & ~((values == base) | (np.isnan(values) & np.isnan(base)))
            columns = np.flatnonzero(differs.any(axis=0))
            if not len(columns):
                continue
            at = int(columns[0])
            row = min(np.flatnonzero(differs[:, at]).tolist(), key=lambda one: places[one])
            step, value, expected = int(table.steps[at]), float(values[row, at]), float(base[row, at])
            order = step, kind_order(table.kind), places[row], table.rank
            name = table.names[row]
            distance = _relative(value, expected)
            found.append(
                (order, Departure(step, table.kind, name, table.rank, word, value, expected, distance))
            )
    first = min(found, key=lambda one: one[0])[1] if found else None
    steps = sorted(run.losses.keys() & reference.losses.keys())
    other_losses = [step for step in steps if repr(run.losses[step]) != repr(reference.losses[step])]
    if not other_losses:
        return Departures(count, first, len(steps), None, None)
    at = other_losses[0]
    return Departures(count, first, len(steps), at, run.losses[at] - reference.losses[at])


def _relative(value: float, expected: float) -> float | None:
    if not (np.isfinite(value) and np.isfinite(expected)):
        return None
    return abs(value - expected) / max(abs(value), abs(expected))


def describe_departures(found: Departures) -> str:
    """Return one sentence: that the runs are equal, or where they first differ and by how much; "" without values."""
    first = found.first
    if not found.values and not found.losses:
        return ""
    equal_losses = f"the losses of {found.losses:,} common steps are equal to the bit"
    losses = equal_losses if found.losses else "no loss is common to both"
    if found.loss_step is not None:
        losses = f"the loss differs from step {found.loss_step}, by {found.loss:+.2g} nats there"
    if first is None:
        if not found.values:
            return f"No table has common values; {losses}"
        if found.loss_step is None:
            return f"The runs are equal: all {found.values:,} common values are the same as written; {losses}"
        return f"All {found.values:,} common values are the same as written; {losses}"
    by = "" if first.relative is None else f", a relative difference of {first.relative:.2g}"
    rank = f" on rank {first.rank}" if first.rank else ""
    return (
        f"First differing value: step {first.step}, {first.statistic} of {first.kind} {first.name}{rank} is "
        f"{first.value:.7g} where the reference has {first.expected:.7g}{by}; {losses}"
    )
