"""Name what came first, the gradient norm or the loss, and the tensors that carry the gradient norm (section 4.6).

A tensor's share: the excess of its squared norm over the expected one, as a part of the sum of all such sizes. Squared
norms of tensors add up to that of the model. Expected is the history of the run, or the reference at the same step.
Correlation: of the tensor's and the model's deviations on a log scale (Pearson), at the AROUND steps before and after.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from numerics.diagnose.loss_files import Curve
from numerics.trend.anomalies import POSITIVE, Anomalies, aligned, compared, statistics_of
from numerics.trend.history import ALARM, BEFORE, LEAST, Floats, History, against, history, transform
from numerics.trend.ranks import binomial_tail
from numerics.trend.tables import Monitored, TrendTable, computation_order, kind_order

NORM_FIRST, LOSS_FIRST, TOGETHER = "gradient norm first", "loss first", "same step"
NORM_ONLY, LOSS_ONLY, NEITHER = "gradient norm only", "loss only", "neither"
GRADIENTS = ("grad_reduced", "grad_unreduced", "grad_clipped")  # preferred first: before clipping
AROUND = 64  # steps before the first chosen one and after it that correlations are computed from
DIFFERS = 16 * 2.0**-8  # relative, in the median over steps: 16 times the rounding of bfloat16
FEWEST, NEARLY_ALL = 8, 0.9  # common steps of a tensor, and the part of them in which it differs
SHARED_STEPS = 16  # anomalous steps, else first common steps, that shares are computed from


@dataclass(frozen=True)
class Carrier:
    """One tensor. share: signed part of the excess. ratio: its norm over the expected one. correlation: or None."""

    name: str
    share: float
    ratio: float
    correlation: float | None


@dataclass(frozen=True)
class Persistent:
    """A tensor that differs from the reference throughout. ratio: median of the norms' ratios. count: of `steps`."""

    name: str
    ratio: float
    count: int
    steps: int


@dataclass(frozen=True)
class RunDifference:
    """The first common step of two runs that differ from it on.

    name: of the tensor that is computed first. ratio: of its values in this step. count: steps in which it is off by
    over DIFFERS, of `steps` common ones.
    """

    step: int
    kind: str
    name: str
    ratio: float
    count: int
    steps: int


@dataclass
class Attribution:
    """order: one of the names above. loss_step, norm_step: the first anomalous ones. kind: the table of gradients.

    carriers: the largest share first. layers: layer -> share. steps: that shares are computed from. anomalous: whether
    these are steps at which the gradient norm is anomalous. excess: of the squared norm over the expected one, as a
    part of it. persistent: tensors that differ from the reference throughout, the largest ratio first. difference: the
    first one of the tensors that differ in nearly all common steps.
    """

    order: str = NEITHER
    loss_step: int | None = None
    norm_step: int | None = None
    kind: str = ""
    carriers: list[Carrier] = field(default_factory=list)
    layers: dict[str, float] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    anomalous: bool = False
    excess: float = math.nan
    persistent: list[Persistent] = field(default_factory=list)
    difference: RunDifference | None = None


def attribute(run: Monitored, found: Anomalies, reference: Monitored | None = None) -> Attribution:
    """Attribute the anomalies of a run."""
    result = Attribution()
    table = gradient_table(run)
    base = gradient_table(reference, table.kind) if reference and table else None
    norms = run.norms or total_norms(table)
    base_norms = (reference.norms or total_norms(base)) if reference else None
    tests = max(1, sum(max(0, len(curve) - BEFORE - LEAST) for curve in (run.losses, norms)))
    result.loss_step, _ = first_anomalous(run.losses, reference.losses if reference else None, tests)
    result.norm_step, steps = first_anomalous(norms, base_norms, tests)
    result.order = _order(result.loss_step, result.norm_step)
    result.difference = first_difference(run, reference) if reference else None
    if table is None or (reference is not None and base is None):
        return result
    result.kind = table.kind
    _shares(result, table, base, steps, found)
    return result


def gradient_table(run: Monitored | None, kind: str = "") -> TrendTable | None:
    """Return the gradients of the first rank that has them: after reduction, where they were monitored."""
    for name in [kind] if kind else GRADIENTS:
        tables = run.of_kind(name) if run else {}
        for table in tables.values():
            if "norm" in table.values:
                return table
    return None


def total_norms(table: TrendTable | None) -> Curve:
    """Return step -> the norm of all tensors, at steps at which every tensor was recorded."""
    if table is None:
        return {}
    whole = table.present.all(axis=0)
    squares = np.square(table.values["norm"].astype(np.float64)).sum(axis=0)
    return dict(zip(table.steps[whole].tolist(), np.sqrt(squares[whole]).tolist(), strict=True))


def first_anomalous(curve: Curve, reference: Curve | None, tests: int) -> tuple[int | None, list[int]]:
    """Return the first anomalous step of a positive curve, and all of them. Not finite is anomalous."""
    steps = sorted(curve)
    if reference is not None:
        steps = [step for step in steps if step in reference]
    if not steps:
        return None, []
    values = np.array([[curve[step] for step in steps]], dtype=np.float32)
    found = _history_of(values, tests)
    bad = ~np.isfinite(values)
    if reference is not None:
        base = np.array([[reference[step] for step in steps]], dtype=np.float32)
        finite = np.isfinite(values) & np.isfinite(base)
        found = against(values, base, finite, _history_of(base, tests), True)
        bad &= np.isfinite(base)
    anomalous = [steps[place] for place in np.flatnonzero((found.anomalous | bad)[0])]
    return (anomalous[0] if anomalous else None), anomalous


def first_difference(run: Monitored, reference: Monitored) -> RunDifference | None:
    """Return the first step and tensor of those that are off by over DIFFERS in nearly all common steps."""
    found: list[tuple[tuple[int, int, int, int], RunDifference]] = []
    for table in run.tables.values():
        for word in {*statistics_of(table)} & {*POSITIVE}:
            base = compared(table, word, reference)
            if base is None:
                continue
            places = computation_order(run, table)
            values = table.values[word].astype(np.float64)
            with np.errstate(all="ignore"):
                ratios = values / base
                sizes = np.abs(np.log(ratios))  # inf where one of two values is zero
                comparable = np.isfinite(values) & np.isfinite(base) & ((values > 0) | (base > 0))
            for row in range(len(values)):
                usable = comparable[row]
                off = usable & (sizes[row] > DIFFERS)
                if usable.sum() < FEWEST or off.sum() < NEARLY_ALL * usable.sum():
                    continue
                at = int(np.flatnonzero(off)[0])
                step = int(table.steps[at])
                counts = float(ratios[row, at]), int(off.sum()), int(usable.sum())
                order = step, kind_order(table.kind), places[row], table.rank
                found.append((order, RunDifference(step, table.kind, table.names[row], *counts)))
    return min(found, key=lambda one: one[0])[1] if found else None


def layer_of(name: str) -> str:
    """Return the layer of a tensor: its path up to the first number, else its module."""
    found = re.match(r"(.*?\.\d+)(?=\.|$)", name) or re.match(r"(\d+)(?=\.|$)", name)
    return found[1] if found else name.rpartition(".")[0] or name


def _history_of(values: Floats, tests: int) -> History:
    return history(values, np.isfinite(values), True, tests)


def _order(loss: int | None, norm: int | None) -> str:
    if loss is None or norm is None:
        return NEITHER if loss == norm else NORM_ONLY if loss is None else LOSS_ONLY
    return TOGETHER if loss == norm else NORM_FIRST if norm < loss else LOSS_FIRST


def _shares(
    result: Attribution,
    table: TrendTable,
    base: TrendTable | None,
    anomalous: Sequence[int],
    found: Anomalies,
) -> None:
    """Fill in carriers, layers, steps and excess. Tensors that the reference lacks are left out."""
    if base is not None:
        rows = [row for row, name in enumerate(table.names) if name in {*base.names}]
        if not rows:
            return
        norms = {"norm": table.values["norm"][rows]}
        names = [table.names[row] for row in rows]
        table = replace(table, names=names, values=norms, present=table.present[rows])
    values = table.values["norm"]
    key = (table.kind, table.rank, "norm")
    if base is not None:
        expected = aligned(base, base.values["norm"], table)
    elif key in found.histories:
        expected = found.histories[key].expected
    else:
        return
    usable = np.asarray(np.all(np.isfinite(values) & np.isfinite(expected), axis=0))
    chosen = [step for step in anomalous if _has(table, step, usable)][:SHARED_STEPS]
    result.anomalous = bool(chosen)
    if not chosen:
        starts = [one.step for one in found.found if one.kind == table.kind and one.rank == table.rank]
        chosen = [step for step in starts if _has(table, step, usable)][:1]
    if not chosen and base is not None:
        chosen = [int(step) for step in table.steps[usable][:SHARED_STEPS]]  # the weights are most alike
    if not chosen:
        return
    result.steps = chosen
    columns = np.searchsorted(table.steps, chosen)
    squares, expectations = (
        np.square(matrix[:, columns].astype(np.float64)).sum(axis=1) for matrix in (values, expected)
    )
    excess = squares - expectations
    if base is not None:
        result.persistent = _persistent(table, expected)
    whole = float(np.abs(excess).sum())
    result.excess = float(excess.sum() / max(expectations.sum(), 1e-300))
    near = np.zeros(len(usable), dtype=bool)
    near[max(0, columns[0] - AROUND) : columns[0] + AROUND + 1] = True
    correlations = _correlations(values, expected, usable & near)
    for row, name in enumerate(table.names):
        share = float(excess[row] / whole) if whole else 0.0
        ratio = math.sqrt(squares[row] / expectations[row]) if expectations[row] > 0 else math.inf
        result.carriers.append(Carrier(name, share, ratio, correlations[row]))
        layer = layer_of(name)
        result.layers[layer] = result.layers.get(layer, 0.0) + share
    result.carriers.sort(key=lambda one: -abs(one.share))
    result.layers = dict(sorted(result.layers.items(), key=lambda item: -abs(item[1])))


def _persistent(table: TrendTable, expected: Floats) -> list[Persistent]:
    """Return the tensors whose norm is on one side of the reference's in too many steps, and off by over DIFFERS."""
    found = []
    for row, name in enumerate(table.names):
        values = table.values["norm"][row]
        usable = np.isfinite(values) & np.isfinite(expected[row]) & (expected[row] > 0) & (values > 0)
        ratios = values[usable].astype(np.float64) / expected[row, usable]
        count = max(int((ratios > 1).sum()), int((ratios < 1).sum()))
        chance = binomial_tail(count, len(ratios), 0.5) * 2 * len(table.names)
        median = float(np.median(ratios)) if len(ratios) else 1.0
        if chance < ALARM and abs(math.log(median)) > DIFFERS:
            found.append(Persistent(name, median, count, len(ratios)))
    return sorted(found, key=lambda one: -abs(math.log(one.ratio)))


def _has(table: TrendTable, step: int, usable: NDArray[np.bool_]) -> bool:
    place = int(np.searchsorted(table.steps, step))
    return place < len(table.steps) and int(table.steps[place]) == step and bool(usable[place])


def _correlations(values: Floats, expected: Floats, usable: NDArray[np.bool_]) -> list[float | None]:
    """Return the correlation of each row's deviation with that of the root of the sum of squares."""
    if usable.sum() < 3:
        return [None] * len(values)
    deviation = transform(values[:, usable], True) - transform(expected[:, usable], True)
    totals = [
        np.log(np.maximum(np.square(matrix[:, usable].astype(np.float64)).sum(axis=0), 1e-300)) / 2
        for matrix in (values, expected)
    ]
    total = totals[0] - totals[1]
    deviation -= deviation.mean(axis=1, keepdims=True)
    total = total - total.mean()
    sizes = np.sqrt(np.square(deviation).sum(axis=1) * np.square(total).sum())
    products = deviation @ total
    return [
        float(product / size) if size > 0 else None for product, size in zip(products, sizes, strict=True)
    ]
