"""Measure each matched pair of calls: what differs in its inputs, its parameters, its settings and its outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from numerics.compare.table.matching import CallPair
from numerics.compare.table.measure import TensorDifference, compare_values, epsilon
from numerics.compare.table.step_record import Call, StepRecord, Value

EQUAL, ROUNDING, BEYOND, WRONG, UNMATCHED = "equal", "rounding", "beyond rounding", "wrong", "unmatched"
SIDES = ("input", "parameter", "output", "gradient")
GRADES = (WRONG, BEYOND, ROUNDING, EQUAL, UNMATCHED)


@dataclass(frozen=True)
class Cell:
    """A recorded value of both sides. side: "input", "parameter" or "output"."""

    side: str
    place: str
    target: Value | None
    golden: Value | None
    difference: TensorDifference


@dataclass
class CallRow:
    """A pair of calls and how it differs. Errors are relative to the scale of each tensor.

    epsilon: of the coarsest dtype within the call. settings: the differences of plain values, in words.
    retyped: inputs and outputs of another dtype, where the model as a whole has the same. flags: parameters of which
    one side computes no gradient; detached: such inputs and outputs. gaps: gradients of one side alone.
    inner: the largest output error of the calls within. replayed: the errors of target and golden against float64,
    in units of rounding.
    """

    pair: CallPair
    cells: list[Cell] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    retyped: dict[str, list[str]] = field(default_factory=dict)  # by side
    flags: list[str] = field(default_factory=list)
    detached: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    epsilon: float = 0.0
    inner: float = 0.0
    grade: str = EQUAL
    replayed: tuple[float, float] | None = None
    replayed_why: str = ""

    @property
    def name(self) -> str:
        return self.pair.call.name

    def error(self, side: str) -> float:
        return max((cell.difference.error for cell in self.cells if cell.side == side), default=0.0)

    def equal(self, side: str) -> bool:
        return all(cell.difference.equal for cell in self.cells if cell.side == side)

    @property
    def unequal(self) -> bool:
        """True where a result differs."""
        return bool(self.gaps) or not (self.equal("output") and self.equal("gradient"))

    def units(self, side: str) -> float:
        """Return the error of a side in units of rounding."""
        error = self.error(side)
        return error / self.epsilon if self.epsilon else (math.inf if error else 0.0)

    @property
    def differs(self) -> list[str]:
        """Return every difference, in words."""
        return [*self.settings, *self.flags, *self.gaps, *self.words(*SIDES)]

    def words(self, *sides: str) -> list[str]:
        """Return what differs, in words."""
        return [
            f"{cell.side} {cell.place}: {cell.difference.what}"
            for cell in self.cells
            if cell.side in sides and not cell.difference.equal and cell.difference.what
        ]


def measure_rows(pairs: Iterable[CallPair], target: StepRecord, golden: StepRecord) -> list[CallRow]:
    """Return a row for each pair, in the order of execution."""
    sizes_passed = (
        value.norm or 0.0 for call in golden.calls.values() if call.backward for value in call.values
    )
    largest = max((size for size in sizes_passed if math.isfinite(size)), default=0.0)
    rows = [_row(pair, largest) for pair in pairs]
    coarse = _other_precision(rows)
    here, there = _epsilons(target), _epsilons(golden)
    for row in rows:
        sizes = [
            of.get(call.forward_name, 0.0)
            for call, of in ((row.pair.target, here), (row.pair.golden, there))
            if call is not None
        ]
        row.epsilon = max(sizes) if coarse else min(sizes)
        if coarse:
            row.retyped = {}
    return rows


def _row(pair: CallPair, largest: float) -> CallRow:
    """Compare a pair of calls. largest: norm of the gradients, the scale of what is computed of them after backward."""
    row = CallRow(pair)
    target, golden = pair.target, pair.golden
    if target is None or golden is None:
        row.grade = UNMATCHED
        return row
    if target.type != golden.type:
        row.settings.append(f"class: {target.type} against {golden.type}")
    row.settings += _settings(target, golden)
    received = _received(golden)
    for side, mine, others in (
        ("input", target.inputs, golden.inputs),
        ("parameter", target.parameters, golden.parameters),
        ("output", target.outputs, golden.outputs),
        ("gradient", target.gradients, golden.gradients),
    ):
        for place in [*others, *(place for place in mine if place not in others)]:
            here, there = mine.get(place), others.get(place)
            passed = side == "gradient" or (side == "output" and golden.backward)
            of_gradients = golden.late and side == "input" and there is not None
            floor = largest / math.sqrt(max(there.count, 1)) if of_gradients and there else 0.0
            if passed and there is not None and len(there.shape) == 1:
                floor = _bias_scale(there, received)
            difference = compare_values(here, there, floor)
            given = [value for value in (here, there) if value is not None and value.kind]
            alone = len(given) == 1
            optional = alone and _is_optional(side, place, target, golden)
            if alone and "." in place and side in ("parameter", "gradient"):
                continue  # of a module within, which one side calls and the other does not
            _compare_types(row, side, place, here, there)
            if alone and golden.backward and given[0].dtype and not optional:
                row.gaps.append(f"{side} {place}: {difference.what}")
            elif any(value.dtype for value in given) and not optional:
                row.cells.append(Cell(side, place, here, there, difference))
            elif not difference.equal:
                row.settings.append(
                    f"{'argument ' if side == 'input' else 'output '}{place}: {difference.what}"
                )
    return row


def _compare_types(row: CallRow, side: str, place: str, target: Value | None, golden: Value | None) -> None:
    """Compare the dtype of forward values, and whether they require a gradient."""
    if target is None or golden is None or row.pair.call.backward or side == "gradient":
        return
    flags = (target.requires_grad, golden.requires_grad)
    if None not in flags and flags[0] != flags[1]:
        text = f"{side} {place}: requires_grad {flags[0]} against {flags[1]}"
        (row.flags if side == "parameter" else row.detached).append(text)
    if target.floating and golden.floating and target.dtype != golden.dtype and side != "parameter":
        row.retyped.setdefault(side, []).append(f"{side} {place}: {target.dtype} against {golden.dtype}")


def _is_optional(side: str, place: str, target: Call, golden: Call) -> bool:
    """Return whether one side may have a value alone: a mask as an argument, a further result, and its gradient."""
    if side not in ("input", "output"):
        return False
    places = (target.inputs, golden.inputs) if side == "input" else (target.outputs, golden.outputs)
    return not golden.backward or any(place not in values for values in places)


def _settings(target: Call, golden: Call) -> list[str]:
    names = [name for name in {**golden.settings, **target.settings} if name != "class"]
    nothing = "absent"
    return [
        f"setting {name}: {target.settings.get(name, nothing)} against {golden.settings.get(name, nothing)}"
        for name in names
        if target.settings
        and golden.settings
        and target.settings.get(name, nothing) != golden.settings.get(name, nothing)
    ]


def _received(golden: Call) -> Value | None:
    """Return the largest gradient that a backward receives."""
    values = [value for value in golden.inputs.values() if golden.backward and value.norm is not None]
    return max(values, key=lambda value: value.norm or 0.0, default=None)


def _bias_scale(bias: Value, received: Value | None) -> float:
    """Return the scale of what the gradient of a bias sums.

    The gradient of a key's bias is zero but for rounding, and has no scale of its own. So is that of a bias before a
    BatchNorm. Of n terms in one partial sum, rounding grows with sqrt(n); the bound of the judgement has room for the
    first 64.
    """
    if received is None or received.norm is None:
        return 0.0
    count = max(bias.count, 1)
    return received.norm / math.sqrt(count) * max(1.0, math.sqrt(received.count / count) / 8)


def _epsilons(record: StepRecord) -> Mapping[str, float]:
    """Return the machine epsilon of the coarsest dtype within each call, by the name of its forward."""
    found: dict[str, float] = {}
    for call in record.calls.values():
        values = (*call.inputs.values(), *call.parameters.values(), *call.outputs.values())
        size = max((epsilon(value.dtype) for value in values if value.dtype), default=0.0)
        name: str | None = call.forward_name
        visited: set[str] = set()
        while name is not None and name not in visited:
            visited.add(name)
            found[name] = max(found.get(name, 0.0), size)
            name = record.parents.get(name)
    return found


def _other_precision(rows: Iterable[CallRow]) -> bool:
    """Return whether most parameters (without parameters, most outputs) have another dtype on the other side."""
    for side in ("parameter", "output"):
        changed = [
            cell.target.dtype != cell.golden.dtype
            for row in rows
            for cell in row.cells
            if cell.side == side
            and cell.target is not None
            and cell.golden is not None
            and cell.golden.floating
        ]
        if changed:
            return 2 * sum(changed) > len(changed)
    return False
