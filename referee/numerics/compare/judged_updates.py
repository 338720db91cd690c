"""Judge what an optimizer did between two consecutive recorded steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from referee.numerics.compare.compared_rows import CallRow, Cell
from referee.numerics.compare.read_record import Value
from referee.numerics.compare.tensor_difference import compare_values, epsilon, load, load_pair


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
        if old is None or not (cell.target and cell.golden):
            continue
        if key in trained:
            updates.append((row, cell))
            error = max(earlier.error, trained[key])
            bound = growth * row.epsilon if earlier.equal else math.sqrt(growth * error)
            judged = earlier.equal or _group(row, cell) != "biases"
            if judged and not cell.difference.equal and _update_error(cell, old) > bound:
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


def _update_error(now: Cell, old: Cell) -> float:
    """Return the error of an update relative to the golden one, without what rounding of the parameter explains."""
    assert now.target is not None
    assert now.golden is not None
    assert old.target is not None
    assert old.golden is not None
    after, before = load_pair(now.target, now.golden), load_pair(old.target, old.golden)
    rounding = 4 * epsilon(now.golden.dtype)
    if after and before:
        mine, golden = (x.double() - y.double() for x, y in zip(after, before, strict=True))
        size = float(load(old.golden).double().square().mean().sqrt())
        error, moved = (float(change.square().mean().sqrt()) for change in (mine - golden, golden))
    else:
        scales = _numbers(old.golden)
        size = max(map(abs, scales))
        mine_moved, golden_moved = (
            [x - y for x, y in zip(_numbers(late), _numbers(early), strict=True)]
            for late, early in ((now.target, old.target), (now.golden, old.golden))
        )
        error = max(abs(x - y) for x, y in zip(mine_moved, golden_moved, strict=True))
        moved = max(map(abs, golden_moved))
    error = max(error - rounding * size, 0.0)
    return error / moved if moved else (math.inf if error else 0.0)


def _numbers(value: Value) -> list[float]:
    """Return the statistics at the scale of an element."""
    root = math.sqrt(max(value.count, 1))
    highest, lowest, mean, norm = (number or 0.0 for number in value.statistics)
    return [highest, lowest, mean, norm / root]
