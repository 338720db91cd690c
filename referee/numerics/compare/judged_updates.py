"""Judge what an optimizer did between two consecutive recorded steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from referee.numerics.compare.compared_rows import CallRow, Cell
from referee.numerics.compare.read_record import Value
from referee.numerics.compare.tensor_difference import compare_values, epsilon, load_pair

Sides = tuple[Value, Value]  # target and golden


@dataclass(frozen=True)
class Earlier:
    """The steps before."""

    rows: Sequence[CallRow]  # of the last one
    place: str  # as in "step0/rank0"
    error: float  # the largest of their gradients
    equal: bool  # whether all of their results are


@dataclass(frozen=True)
class WrongUpdate:
    """A parameter whose change since the step before is not explained."""

    row: CallRow
    cell: Cell
    evidence: str  # "update"; "parameter" for one that is not trained
    context: tuple[str, ...] = ()


def wrong_updates(rows: Sequence[CallRow], earlier: Earlier, growth: float) -> WrongUpdate | None:
    """Return the first parameter whose update since the step before its gradient does not explain.

    The error of an update is relative to the update: |d - d'| / |d'|, with d the change of a parameter. Where every
    gradient before was equal, updates may differ by rounding. Where gradients have the relative error e, Adam divides
    elements of the size of e by themselves: a share e of the elements has an update of any sign, which is an error of
    sqrt(e) of the update. An update is wrong above sqrt(growth x e). Biases are then not judged: the gradient of a
    key's bias is zero but for rounding. A parameter or buffer that is not trained has at most the error that it had.
    """
    before = {
        (row.name, cell.side, cell.place): cell
        for row in earlier.rows
        for cell in row.cells
        if cell.side in ("parameter", "buffer")
    }
    trained = {
        (row.pair.call.path, cell.place): compare_values(cell.target, cell.golden).error
        for row in earlier.rows
        for cell in row.cells
        if cell.side == "gradient"
    }
    updates, wrong = [], []
    parameters = [(row, cell) for row in rows for cell in row.cells if cell.side == "parameter"]
    for row, cell in parameters:
        old, key = before.get((row.name, "parameter", cell.place)), (row.pair.call.path, cell.place)
        if old is None or not (cell.target and cell.golden and old.target and old.golden):
            continue
        if key in trained:
            updates.append((row, cell))
            error = max(earlier.error, trained[key])
            bound = growth * row.epsilon if earlier.equal else math.sqrt(growth * error)
            judged = earlier.equal or _group(row, cell) != "biases"
            sides = (cell.target, cell.golden), (old.target, old.golden)
            if judged and not cell.difference.equal and _update_error(*sides) > bound:
                wrong.append((row, cell))
        elif cell.golden.requires_grad is False:
            written = before.get((row.name, "buffer", cell.place), old)
            if cell.difference.error > growth * (row.epsilon + written.difference.error):
                return WrongUpdate(row, cell, "parameter")
    if not wrong:
        return None
    groups = {_group(*update) for update in wrong}
    every = {_group(*update) for update in updates}
    named = "all" if groups == every else ", ".join(sorted(groups))
    context = (f"{len(wrong)} of {len(updates)} parameters after {earlier.place}", f"groups: {named}")
    return WrongUpdate(*wrong[0], "update", context)


def _group(row: CallRow, cell: Cell) -> str:
    assert cell.golden is not None
    kind = row.pair.call.type.lower()
    if "norm" in kind:
        return "norms"
    if "embedding" in kind:
        return "embeddings"
    return "matrices" if len(cell.golden.shape) > 1 else "biases"


def _update_error(now: Sides, old: Sides) -> float:
    """Return the error of an update relative to the golden one, without what rounding of the parameter explains."""
    after, before = load_pair(*now), load_pair(*old)
    loaded = after is not None and before is not None
    if after is None or before is None:
        after, before = ((_numbers(target), _numbers(golden)) for target, golden in (now, old))

    def size(x: Tensor) -> float:
        return float(x.square().mean().sqrt() if loaded else x.abs().max())

    mine, golden = (late.double() - early.double() for late, early in zip(after, before, strict=True))
    rounding = 4 * epsilon(now[1].dtype) * size(before[1].double())
    error, moved = max(size(mine - golden) - rounding, 0.0), size(golden)
    return error / moved if moved else (math.inf if error else 0.0)


def _numbers(value: Value) -> Tensor:
    """Return the statistics at the scale of an element."""
    highest, lowest, mean, norm = (number or 0.0 for number in value.statistics)
    numbers = [highest, lowest, mean, norm / math.sqrt(max(value.count, 1))]
    return torch.tensor(numbers, dtype=torch.float64)
