"""List the anomalies of a run: values that are not finite, and values that leave their history or a reference run.

One statistic of a tensor is tested, so that one event is not counted many times: the norm; of attention its entropy and
its largest logit; else the first of std, max. With a reference run a value is compared with the reference's value at
the same step (`history.against`), so a step that is unusual in both runs is not an anomaly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from numerics.trend.history import BEFORE, LEAST, Flags, Floats, History, against, history, with_history
from numerics.trend.tables import Monitored, TrendTable, computation_order, kind_order

NOT_FINITE, HISTORY, REFERENCE = "not finite", "leaves its history", "differs from the reference"
TESTED: dict[str, tuple[str, ...]] = {
    "attention": ("entropy", "logit_max"),
    "update_ratio": ("ratio",),
    "mg_direction": (),  # noise around 0.5, with no common scale of small tensors
}
DEFAULT = ("norm", "std", "max")
POSITIVE = ("norm", "std", "ratio", "entropy")
Key = tuple[str, int, str]  # kind, rank, statistic


@dataclass(frozen=True)
class Anomaly:
    """The first of successive steps at which one tensor is anomalous.

    position: the place of the tensor in the order of computation. units: signed deviation in medians; limit: of its
    size. steps: how many recorded steps it lasts.
    """

    step: int
    kind: str
    rank: int
    position: int
    name: str
    statistic: str
    reason: str
    value: float
    expected: float
    units: float
    limit: float
    steps: int

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The place in the order of computation; backward begins at the last layer."""
        return self.step, kind_order(self.kind), self.position, self.rank


@dataclass
class Anomalies:
    """The anomalies of one run in the order of computation, and all histories.

    tests: the number of values that are compared with a history or the reference. steps: those of the run; tested:
    those with such a value. most: the largest number of steps of a tensor, with a reference in both runs.
    """

    found: list[Anomaly] = field(default_factory=list)
    histories: dict[Key, History] = field(default_factory=dict)
    tests: int = 0
    steps: set[int] = field(default_factory=set)
    tested: set[int] = field(default_factory=set)
    most: int = 0

    @property
    def advice(self) -> list[str]:
        """Return what to monitor where no anomaly was found, and most monitored steps were not tested."""
        spaced = bool(self.steps) and max(self.steps) - min(self.steps) >= len(self.steps)
        if self.found or (self.tests and not (spaced and 2 * len(self.tested) < len(self.steps))):
            return []
        return [
            f"monitor every step (CONFIG_MONITOR_INTERVAL=1, step_interval 1 in config.json), and more than "
            f"{BEFORE + LEAST} steps; only {len(self.tested)} of {len(self.steps)} were tested"
        ]

    @property
    def first(self) -> Anomaly | None:
        return self.found[0] if self.found else None


def statistics_of(table: TrendTable) -> list[str]:
    """Return the statistics of a table that are tested."""
    names = TESTED.get(table.kind)
    if names is None:
        names = tuple(name for name in DEFAULT if name in table.values)[:1]
    return [name for name in names if name in table.values]


def find_anomalies(run: Monitored, reference: Monitored | None = None) -> Anomalies:
    """Test every table of a run, against the reference where one is given and has the table."""
    result = Anomalies()
    columns = [(table, word) for table in run.tables.values() for word in statistics_of(table)]
    bases = [compared(table, word, reference) if reference else None for table, word in columns]
    for (table, word), base in zip(columns, bases, strict=True):
        _count(result, table, word, base if reference else table.values[word])
    for (table, word), base in zip(columns, bases, strict=True):
        key = (table.kind, table.rank, word)
        values, positive = table.values[word], word in POSITIVE
        finite = table.present & np.isfinite(values)
        other = reference.tables.get(key[:2]) if reference else None
        if reference is None:
            result.histories[key] = history(values, finite, positive, result.tests)
        elif base is not None:
            base_finite = np.isfinite(base)
            envelope = history(base, base_finite, positive, result.tests)
            result.histories[key] = against(values, base, finite & base_finite, envelope, positive)
        events = _events(table, word, result.histories.get(key), other)
        places = computation_order(run, table)
        result.found += [replace(one, position=places[one.position]) for one in events]
    result.found.sort(key=lambda one: one.order)
    return result


def compared(table: TrendTable, word: str, reference: Monitored) -> Floats | None:
    """Return the reference's values of a statistic, with the names and steps of the table; None without any."""
    other = reference.tables.get((table.kind, table.rank))
    return aligned(other, other.values[word], table) if other and word in other.values else None


def only_in(run: Monitored, other: Monitored) -> tuple[list[str], list[str]]:
    """Return the kinds that only the first run has, and its tensors of common kinds that the other one lacks."""
    kinds = list(dict.fromkeys(kind for kind, _ in sorted(run.tables, key=lambda key: kind_order(key[0]))))
    tensors: dict[str, None] = {}
    for kind in kinds:
        has, lacks = (
            dict.fromkeys(name for table in one.of_kind(kind).values() for name in table.names)
            for one in (run, other)
        )
        tensors |= dict.fromkeys(name for name in has if lacks and name not in lacks)
    return [kind for kind in kinds if not other.of_kind(kind)], list(tensors)


def _count(result: Anomalies, table: TrendTable, word: str, base: Floats | None) -> None:
    """Count the values that are tested, and their steps. base: the values with the history."""
    result.steps |= {*table.steps.tolist()}
    if base is None:
        return
    finite = table.present & np.isfinite(table.values[word])
    flags = with_history(np.isfinite(base)) & finite
    result.tests += int(flags.sum())
    result.tested |= {*table.steps[flags.any(axis=0)].tolist()}
    result.most = max(result.most, int((finite & np.isfinite(base)).sum(axis=1).max(initial=0)))


def aligned(table: TrendTable, values: Floats, like: TrendTable) -> Floats:
    """Return values (tensors, steps) of a table with the names and steps of another; NaN where they lack."""
    found = np.full(like.present.shape, np.nan, dtype=np.float32)
    places = {name: row for row, name in enumerate(table.names)}
    rows = [(here, places[name]) for here, name in enumerate(like.names) if name in places]
    _, columns, others = np.intersect1d(like.steps, table.steps, return_indices=True)
    if rows and len(columns):
        here, there = map(np.array, zip(*rows, strict=True))
        found[np.ix_(here, columns)] = np.where(table.present, values, np.nan)[np.ix_(there, others)]
    return found


def not_finite(table: TrendTable) -> Flags:
    """Return where a tensor is not finite. Inf in every step is left out: it is a mask.

    So is Inf in the first steps of an update ratio: the weights before were zero, as new biases are.
    """
    nan, inf = (np.zeros(table.present.shape, dtype=bool) for _ in range(2))
    for word, values in table.values.items():
        if word in ("nan", "inf"):
            target = nan if word == "nan" else inf
            target |= values > 0
        else:
            inf |= np.isinf(values)
            if "nan" not in table.values:
                nan |= np.isnan(values)
    inf &= table.present
    if table.kind == "update_ratio":
        inf &= np.logical_or.accumulate(table.present & ~inf, axis=1)
    always = np.all(inf | ~table.present, axis=1, keepdims=True)
    return np.asarray((nan & table.present) | (inf & ~always))


def _events(
    table: TrendTable, word: str, found: History | None, other: TrendTable | None
) -> Iterator[Anomaly]:
    """Yield the anomalies of one statistic. A table is checked for values that are not finite once."""
    values = table.values[word]
    if word == statistics_of(table)[0]:
        bad = not_finite(table)
        if other is not None:
            both = aligned(other, not_finite(other).astype(np.float32), table) > 0
            bad &= ~both
        for row, column, length in _starts(bad, table.present):
            yield _anomaly(table, word, row, column, length, NOT_FINITE, found)
    if found is not None:
        reason = HISTORY if other is None else REFERENCE
        flags = found.anomalous & np.isfinite(values)
        if other is None and table.kind == "update_ratio":
            flags &= found.units > 0  # the schedule lowers it, often to 0 at its end
        for row, column, length in _starts(flags, table.present):
            yield _anomaly(table, word, row, column, length, reason, found)


def _starts(flags: Flags, present: Flags) -> Iterator[tuple[int, int, int]]:
    """Yield row, column and number of steps of each run of flags. Steps that are not present end no run."""
    for row in np.flatnonzero(flags.any(axis=1)):
        columns = np.flatnonzero(present[row])
        marked = np.concatenate([[False], flags[row, columns], [False]]).astype(np.int8)
        starts, ends = np.flatnonzero(np.diff(marked) == 1), np.flatnonzero(np.diff(marked) == -1)
        for start, end in zip(starts, ends, strict=True):
            yield int(row), int(columns[start]), int(end - start)


def _anomaly(
    table: TrendTable, word: str, row: int, column: int, length: int, reason: str, found: History | None
) -> Anomaly:
    of: Mapping[str, float] = {
        name: float(getattr(found, name)[row, column]) if found is not None else float("nan")
        for name in ("expected", "units", "limits")
    }
    return Anomaly(
        int(table.steps[column]),
        table.kind,
        table.rank,
        row,
        table.names[row],
        word,
        reason,
        float(table.values[word][row, column]),
        of["expected"],
        of["units"],
        of["limits"],
        length,
    )
