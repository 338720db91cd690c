"""Measure each matched pair of calls: what differs in its inputs, its parameters, its settings and its results."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from referee.errors import described
from referee.numerics.compare.matched_calls import Pair
from referee.numerics.compare.tensor_difference import (
    TensorDifference,
    compare_values,
    epsilon,
    load,
    load_pair,
)
from referee.numerics.record.read_record import Call, StepRecord, Value
from referee.numerics.rounding.replayed_calls import (
    LARGEST,
    NotReplayableError,
    function_call,
    without_shared,
)
from referee.numerics.rounding.within_rounding import BOUND, RANDOM, CallOutput, within_rounding
from referee.numerics.rows import TableRow

PRODUCT = re.compile(r"linear|conv|matmul|mm$|einsum|dot$", re.IGNORECASE)
NORMALISATION = re.compile(r"(layer|rms|group|batch|instance)_?norm(\dd)?$", re.IGNORECASE)


def sum_scale(backward: Call, forward: Call | None, side: str, place: str, gradient: Value) -> float:
    """Return the rms of the sum of a gradient's terms by cases 1 and 2; 0 where it is unknown."""
    values = (value for value in backward.inputs.values() if value.norm)
    received = max(values, key=lambda value: value.norm or 0.0, default=None)
    if received is None or not gradient.shape:
        return 0.0
    if len(gradient.shape) == 1:
        return received.rms * received.count / max(gradient.count, 1)
    if forward is None or not PRODUCT.search(forward.type or forward.path):
        return 0.0
    tensors = [value for value in forward.inputs.values() if value.dtype]
    factors = {("output", str(index)): value for index, value in enumerate(tensors)}
    factors |= {("gradient", at): value for at, value in forward.parameters.items()}
    others = [value for at, value in factors.items() if at != (side, place) and len(value.shape) > 1]
    other = max(others, key=lambda value: value.rms, default=None)
    if other is None:
        return 0.0
    inner = math.sqrt(received.count * other.count / max(gradient.count, 1))
    scale = received.rms * other.rms * math.sqrt(inner)
    return scale if math.isfinite(scale) else 0.0


def normalisation_scale(backward: Call | None, forward: Call | None) -> float:
    """Return the rms of the terms in a normalisation's backward; 0 where the call is none or they are unknown."""
    found = NORMALISATION.search(backward.type or backward.path) if backward else None
    if backward is None or forward is None or not found:
        return 0.0
    x = next((value for value in forward.inputs.values() if value.dtype), None)
    received = next((value for value in backward.inputs.values() if value.floating), None)
    if received is None or x is None or x.mean is None or x.norm is None:
        return 0.0
    mean = 0.0 if found[1].lower() == "rms" else x.mean
    spread = x.rms**2 - mean**2
    weight = _weight(forward)
    scale = received.rms * (weight.rms if weight else 1.0)
    scale = scale / math.sqrt(spread) if spread > 0 else 0.0
    return scale if math.isfinite(scale) else 0.0


def _weight(forward: Call) -> Value | None:
    if forward.is_module:
        return forward.parameters.get("weight")
    running = forward.path.endswith(("batch_norm", "instance_norm"))  # running mean and variance come before
    return forward.inputs.get("weight") or forward.inputs.get("3" if running else "2")


EQUAL, ROUNDING, BEYOND, WRONG, UNMATCHED = "equal", "rounding", "beyond rounding", "wrong", "unmatched"


@dataclass(frozen=True)
class Cell:
    """A recorded tensor of both sides. A buffer is one that the call has written."""

    side: str  # of read_record.SIDES
    place: str  # among the values of the side, as in "0.hidden"
    target: Value | None
    golden: Value | None
    difference: TensorDifference


@dataclass
class CallRow:
    """A call of both sides, or of one, and how it differs. Errors are relative to the scale of each tensor.

    What is no tensor, or of a tensor its dtype, flag or presence, is a row of the table of all commands.
    """

    target: Call | None
    golden: Call | None
    position: int = 0  # in the order of execution
    cells: list[Cell] = field(default_factory=list)
    settings: list[TableRow] = field(default_factory=list)
    retyped: list[TableRow] = field(default_factory=list)  # inputs and results of another dtype
    flags: list[TableRow] = field(default_factory=list)  # parameters without a gradient on one side
    detached: list[TableRow] = field(default_factory=list)  # such inputs and results
    lost: list[TableRow] = field(default_factory=list)  # parameters of one side alone
    gaps: list[TableRow] = field(default_factory=list)  # gradients of one side alone
    epsilon: float = 0.0  # of the coarsest dtype within the call
    inner: float = 0.0  # the largest error of a result of the calls within
    grade: str = EQUAL
    replayed: tuple[float, float] | None = None  # units of rounding of target and golden against float64

    @property
    def call(self) -> Call:
        """Return the golden call, else the target's."""
        found = self.golden or self.target
        assert found is not None
        return found

    @property
    def name(self) -> str:
        return self.call.name

    def plain(self, side: str, place: str, target: str, golden: str) -> TableRow:
        """Return a difference that has no size. side: "setting", "argument", or one of read_record.SIDES."""
        return TableRow(self.name, side, place, target, golden, evidence="setting")

    def error(self, *sides: str) -> float:
        return max((cell.difference.error for cell in self.cells if cell.side in sides), default=0.0)

    def equal(self, *sides: str) -> bool:
        return all(cell.difference.equal for cell in self.cells if cell.side in sides)

    @property
    def unequal(self) -> bool:
        """True where a result differs."""
        return bool(self.gaps) or not self.equal("output", "gradient", "buffer")

    def units(self, side: str) -> float:
        """Return the error of a side in units of rounding."""
        return self.in_units(self.error(side))

    def in_units(self, error: float) -> float:
        """Return an error of the row in units of rounding."""
        return error / self.epsilon if self.epsilon else (math.inf if error else 0.0)

    @property
    def differs(self) -> list[str]:
        """Return every difference, in words."""
        cells = [cell for cell in self.cells if not cell.difference.equal and cell.difference.what]
        texts = [f"{cell.side} {cell.place}: {cell.difference.what}" for cell in cells]
        return [*(row.text for row in (*self.settings, *self.flags, *self.lost, *self.gaps)), *texts]


def measure_rows(pairs: Iterable[Pair], target: StepRecord, golden: StepRecord) -> list[CallRow]:
    """Return a row for each pair, in the order of execution."""
    sizes_passed = (
        value.norm or 0.0 for call in golden.calls.values() if call.backward for value in call.values
    )
    largest = max((size for size in sizes_passed if math.isfinite(size)), default=0.0)
    rows = [_row(CallRow(*pair, place), target, golden, largest) for place, pair in enumerate(pairs)]
    coarse = _other_precision(rows)
    here, there = _epsilons(target), _epsilons(golden)
    for row in rows:
        sizes = [
            of.get(call.forward_name, 0.0)
            for call, of in ((row.target, here), (row.golden, there))
            if call is not None
        ]
        row.epsilon = max(sizes) if coarse else min(sizes)
        if coarse:
            row.retyped = []
    return rows


def _row(row: CallRow, target_record: StepRecord, golden_record: StepRecord, largest: float) -> CallRow:
    """Compare the calls of a row. largest: norm of the gradients, the scale of what is computed after backward."""
    target, golden = row.target, row.golden
    if target is None or golden is None:
        row.grade = UNMATCHED
        return row
    if target.type != golden.type:
        row.settings.append(row.plain("setting", "class", target.type, golden.type))
    row.settings += _settings(row, target, golden)
    forwards = target_record.calls.get(target.forward_name), golden_record.calls.get(golden.forward_name)
    places = [set(forward.parameters) if forward else set() for forward in forwards]
    lost = places[0] ^ places[1]  # parameters of one side alone, whose gradients are not compared
    for side, others in golden.sides.items():
        mine = target.sides[side]
        for place in [*others, *(place for place in mine if place not in others)]:
            here, there = mine.get(place), others.get(place)
            lacking = [
                of for of, value in zip(forwards, (here, there), strict=True) if not (value and value.dtype)
            ]
            if golden.backward and side == "output" and any(_is_cast(forward, place) for forward in lacking):
                continue
            floor = 0.0
            if golden.late and side == "input" and there is not None:
                floor = largest / math.sqrt(max(there.count, 1))
            elif golden.backward and side in ("output", "gradient") and there is not None:
                floor = sum_scale(golden, forwards[1], side, place, there)
            if side != "gradient" or place not in lost:
                _compare(row, side, place, here, there, compare_values(here, there, floor))
    return row


def _is_cast(forward: Call | None, place: str) -> bool:
    """Return whether autocast casts this argument, a parameter: its gradient may pass by a copy of an earlier call."""
    if forward is None or forward.is_module:
        return False
    given = [value for value in forward.inputs.values() if value.dtype]
    results = [value.dtype for value in forward.outputs.values() if value.floating]
    if not place.isdigit() or int(place) >= len(given):
        return False
    value = given[int(place)]
    return value.is_parameter and bool(value.requires_grad) and value.dtype not in results


def _compare(
    row: CallRow,
    side: str,
    place: str,
    here: Value | None,
    there: Value | None,
    difference: TensorDifference,
) -> None:
    """Add a pair of values to the row, as what it is."""
    target, golden = row.target, row.golden
    assert target is not None
    assert golden is not None
    given = [value for value in (here, there) if value is not None and value.kind]
    alone = len(given) == 1
    optional = alone and _is_optional(side, place, target, golden)
    if alone and "." in place and side in ("parameter", "gradient"):
        return  # of a module within, which one side calls and the other does not
    _compare_types(row, side, place, here, there)
    shapes = {value.shape for value in given if value.dtype}
    if side == "output" and place != "0" and row.settings and len(shapes) > 1 and not golden.backward:
        optional = True  # a further result has the form that an argument says
    texts = (value.describe() if value is not None and value.kind else "absent" for value in (here, there))
    plain = row.plain("argument" if side == "input" else side, place, *texts)
    if alone and side in ("parameter", "buffer"):
        row.lost.append(plain)
    elif alone and golden.backward and given[0].dtype and not optional:
        row.gaps.append(row.plain(side, place, plain.target, plain.golden))
    elif any(value.dtype for value in given) and not optional:
        row.cells.append(Cell(side, place, here, there, difference))
    elif not difference.equal:
        row.settings.append(plain)


def _compare_types(row: CallRow, side: str, place: str, target: Value | None, golden: Value | None) -> None:
    """Compare the dtype of forward values, and whether they require a gradient."""
    if target is None or golden is None or row.call.backward or side in ("gradient", "buffer"):
        return
    flags = (target.requires_grad, golden.requires_grad)
    if None not in flags and flags[0] != flags[1]:
        found = row.plain(side, place, f"requires_grad {flags[0]}", f"requires_grad {flags[1]}")
        (row.flags if side == "parameter" else row.detached).append(found)
    if target.floating and golden.floating and target.dtype != golden.dtype and side != "parameter":
        row.retyped.append(row.plain(side, place, target.dtype, golden.dtype))


def _is_optional(side: str, place: str, target: Call, golden: Call) -> bool:
    """Return whether one side may have a value alone: a mask as an argument, a further result, and its gradient."""
    if side not in ("input", "output"):
        return False
    return not golden.backward or any(place not in call.sides[side] for call in (target, golden))


def _settings(row: CallRow, target: Call, golden: Call) -> list[TableRow]:
    if not (target.settings and golden.settings):
        return []
    names = [name for name in {**golden.settings, **target.settings} if name != "class"]
    pairs = ((name, *(str(call.settings.get(name, "absent")) for call in (target, golden))) for name in names)
    return [row.plain("setting", name, mine, other) for name, mine, other in pairs if mine != other]


def is_parameter(cell: Cell) -> bool:
    """Return whether both sides recorded a parameter here: of a module, or as an argument of a function."""
    of_module = cell.side == "parameter" or (
        cell.side == "input" and cell.golden is not None and cell.golden.is_parameter
    )
    return of_module and cell.target is not None and cell.golden is not None


def _epsilons(record: StepRecord) -> Mapping[str, float]:
    """Return the machine epsilon of the coarsest dtype within each call, by the name of its forward."""
    found: dict[str, float] = {}
    for call in record.calls.values():
        values = (*call.inputs.values(), *call.parameters.values(), *call.outputs.values())
        size = max((epsilon(value.dtype) for value in values if value.dtype), default=0.0)
        for name in (call.forward_name, *record.around(call.forward_name)):
            found[name] = max(found.get(name, 0.0), size)
    return found


def _other_precision(rows: Iterable[CallRow]) -> bool:
    """Return whether one side as a whole computes in another dtype: the parameters, or every call of a kind.

    One layer of several in another dtype is a difference of this layer.
    """
    parameters = [cell for row in rows for cell in row.cells if is_parameter(cell)]
    floating = [cell for cell in parameters if cell.golden is not None and cell.golden.floating]
    changed = [
        cell for cell in floating if cell.target and cell.golden and cell.target.dtype != cell.golden.dtype
    ]
    if changed:
        return 2 * len(changed) > len(floating)
    kinds: dict[str, list[bool]] = {}
    for row in rows:
        retyped = {value.side for value in row.retyped}
        counts = "output" in retyped or "input" not in retyped
        if row.grade != UNMATCHED and not row.call.backward and counts:
            kinds.setdefault(row.call.type or row.call.path, []).append("output" in retyped)
    sources = [flags for flags in kinds.values() if any(flags)]
    return bool(sources) and all(all(flags) for flags in sources) and max(map(len, sources)) > 1


# Judge what an optimizer did between two consecutive recorded steps.


Sides = tuple[Value, Value]  # target and golden


@dataclass(frozen=True)
class Earlier:
    """The steps before."""

    rows: Sequence[CallRow]  # of the last one
    place: str  # as in "step0/rank0"
    error: float  # the largest of their gradients
    equal: bool  # whether all of their results are


def wrong_updates(
    rows: Sequence[CallRow], earlier: Earlier, growth: float
) -> tuple[CallRow, Cell, str, str] | None:
    """Return the first parameter whose update since the step before its gradient does not explain.

    With it the evidence, "update", or "parameter" of one that is not trained; and how many there are.

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
        (row.call.path, cell.place): compare_values(cell.target, cell.golden).error
        for row in earlier.rows
        for cell in row.cells
        if cell.side == "gradient"
    }
    count, wrong = 0, []
    parameters = [(row, cell) for row in rows for cell in row.cells if cell.side == "parameter"]
    for row, cell in parameters:
        old, key = before.get((row.name, "parameter", cell.place)), (row.call.path, cell.place)
        if old is None or not (cell.target and cell.golden and old.target and old.golden):
            continue
        if key in trained:
            count += 1
            error = max(earlier.error, trained[key])
            bound = growth * row.epsilon if earlier.equal else math.sqrt(growth * error)
            judged = earlier.equal or not _is_bias(row, cell)
            sides = (cell.target, cell.golden), (old.target, old.golden)
            if judged and not cell.difference.equal and _update_error(*sides) > bound:
                wrong.append((row, cell))
        elif cell.golden.requires_grad is False:
            written = before.get((row.name, "buffer", cell.place), old)
            if cell.difference.error > growth * (row.epsilon + written.difference.error):
                return row, cell, "parameter", ""
    return (
        (*wrong[0], "update", f"{len(wrong)} of {count} parameters after {earlier.place}") if wrong else None
    )


def _is_bias(row: CallRow, cell: Cell) -> bool:
    is_layer = not any(kind in row.call.type.lower() for kind in ("norm", "embedding"))
    return is_layer and cell.golden is not None and len(cell.golden.shape) < 2


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
    numbers = [*(number or 0.0 for number in value.statistics[:3]), value.rms]
    return torch.tensor(numbers, dtype=torch.float64)


# Run the calls of a pair in float64, each side on its own recorded inputs.


def replay_row(row: CallRow, forward: CallRow | None, layers: bool) -> None:
    """Set `replayed`: the errors of target and golden against the golden call, in units of a bound of BOUND.

    forward: of a backward. layers: whether calls of modules are replayed. A layer or a backward whose golden result is
    far from that of torch has a hook or another forward: it is not replayed.
    """
    target, golden = row.target, row.golden
    if target is None or golden is None or (golden.is_module and (golden.backward or not layers)):
        return
    if tensors_of(target.outputs).keys() != tensors_of(golden.outputs).keys():
        return
    with contextlib.suppress(NotReplayableError):
        if not golden.backward:
            right, mine = replayed_error(golden, golden), replayed_error(golden, target)
        elif forward is None or forward.target is None or forward.golden is None:
            return
        else:
            call = forward.golden
            right = replayed_error(call, call, golden)
            mine = replayed_error(call, forward.target, target)
        if right <= BOUND or not (golden.is_module or golden.backward):
            row.replayed = mine, right


def tensors_of(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values that are tensors."""
    return {place: value for place, value in values.items() if value.dtype}


def replayed_error(call: Call, side: Call, backward: Call | None = None) -> float:
    """Return the largest error of a side's recorded results in units of rounding, relative to a bound of BOUND.

    call: the function and its plain arguments, or the layer and its settings. side: the recorded tensors. backward: of
    the side; its gradients are measured in place of the results. NotReplayableError says why there is no error.
    """
    inputs, state, results = map(tensors_of, (side.inputs, side.parameters, side.outputs))
    used = [*inputs.values(), *state.values()]
    gradients = [*backward.inputs.values(), *backward.outputs.values()] if backward else []
    needed = [value for value in (*used, *results.values(), *gradients) if value.dtype]
    is_recorded = all(value.has_values for value in needed)
    if not used or not is_recorded or not any(value.floating for value in results.values()):
        raise NotReplayableError("no recorded values")
    if sum(value.count for value in (*used, *results.values())) > LARGEST:
        raise NotReplayableError("large")
    tensors, weights, outputs = (
        {place: load(value) for place, value in values.items()} for values in (inputs, state, results)
    )
    again = function_call(call, tensors, weights)
    received, passed = None, []
    if backward is not None:
        received = [_loaded(backward.inputs, index) for index in range(len(results))]
        floating = [index for index, value in enumerate(inputs.values()) if value.floating]
        passed = without_shared(again.tensors, [_loaded(backward.outputs, index) for index in floating])
    try:
        wanted = [gradient is not None for gradient in passed]
        again = replace(again, received=received, wanted=wanted)
        errors = within_rounding(again, CallOutput(list(outputs.values()), passed))
    except Exception as error:  # torch raises many kinds for arguments of another dtype
        raise NotReplayableError(f"{described(error)} in float64") from error
    if any(error.why == RANDOM for error in errors):
        raise NotReplayableError(RANDOM)
    part = "gradient" if backward else "result"
    units = [error.units * BOUND / error.bound for error in errors if error.part.startswith(part)]
    if not units:
        raise NotReplayableError(f"no {part}")
    return max(units)


def _loaded(values: Mapping[str, Value], place: int) -> Tensor | None:
    value = values.get(str(place))
    return load(value) if value is not None and value.dtype else None
