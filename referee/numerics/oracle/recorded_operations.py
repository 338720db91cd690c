"""The operations of a recorded step: its calls of functions, and of single layers of torch.nn.

Their tensors are the recorded values, or numbers with the recorded statistics. Of a large call the first rows are
taken, where each row of the result depends on one row of the inputs.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from referee.numerics.compare.tensor_difference import load
from referee.numerics.record.captured_steps import backward_name
from referee.numerics.record.read_record import Call, StepRecord, Value, find_records, read_record
from referee.numerics.rounding.operation_checks import Operation, Skipped
from referee.numerics.rounding.optimizer_checks import custom_operations, step_operations
from referee.numerics.rounding.replayed_calls import (
    LARGEST,
    STAND_INS,
    NotReplayableError,
    function_call,
    recorded_function,
    without_shared,
)

WITHIN = "a module: the recorded calls within it are checked"
LOW = (torch.bfloat16, torch.float16)
CONVERSIONS = ("to", "type", "type_as", "float", "half", "bfloat16", "double", "copy_")
# Results depend on the order of writes where an index repeats, as a generated one does.
ORDERED = ("scatter", "scatter_", "index_copy", "index_copy_", "index_put", "index_put_", "__setitem__")
# Of these, the first argument and the results have the same rows; other arguments belong to all rows.
FIRST = "linear linear_pointwise gelu relu silu tanh sigmoid exp log layer_norm rms_norm embedding".split()  # noqa: SIM905
# Of these, every tensor with as many rows as the first has these rows.
ALL = "scaled_dot_product_attention softmax log_softmax add sub mul truediv cross_entropy".split()  # noqa: SIM905


def operations(path: Path) -> Iterator[Operation | Skipped]:
    """Yield the operations of a record (a dump, a step or a rank), or why one cannot be checked.

    NumericsError where the record cannot be used.
    """
    found = find_records(path)
    for place, folder in found.items():
        record = read_record(folder)
        prefix = f"{place}/" if len(found) > 1 else ""
        functions = any(not call.is_module for call in record.calls.values())
        for call in record.calls.values():
            if call.backward:
                continue
            try:
                yield dataclasses.replace(_operation(call, record, functions), name=prefix + call.name)
            except NotReplayableError as reason:
                yield Skipped(prefix + call.name, _label(call), str(reason))
        yield from custom_operations(folder, prefix)
        yield from step_operations(folder, prefix)


def _operation(call: Call, record: StepRecord, functions: bool) -> Operation:
    """Return the operation of a call. NotReplayableError has the reason where there is none."""
    _check_kind(call, functions)
    name = call.path.rpartition(".")[2]
    given = {place: value for place, value in call.inputs.items() if value.dtype}
    ordered = [*(call.parameters.values() if call.is_module else ()), *given.values()]
    results = [value for value in call.outputs.values() if value.dtype]
    is_recorded = all(value.has_values for value in ordered)
    if any(value.layout == "nested" for value in ordered):
        raise NotReplayableError("nested tensors")
    if any(value.unknown for value in ordered):
        raise NotReplayableError("values of unknown range")
    if not any(value.floating for value in ordered):
        raise NotReplayableError("no floating tensor")
    if not is_recorded and name in ORDERED:
        raise NotReplayableError("a generated index may repeat")
    first, rows = ordered[0], _first_rows(call, ordered)
    plain = _plain_name(name)
    tensors = {
        place: tensor_of(value, f"{call.name} {place}", rows if _has_rows(plain, value, first) else None)
        for place, value in given.items()
    }
    state = {
        at: tensor_of(value, f"{call.name} {at}") for at, value in call.parameters.items() if call.is_module
    }
    again, reference = function_call(call, tensors, state), STAND_INS.get(call.path)
    if reference is not None:
        _, space, operation = call.path.split(".")
        again = dataclasses.replace(again, function=getattr(getattr(torch.ops, space), operation))
    backward = record.calls.get(backward_name(call.name))
    received, passed = None, []
    if backward and backward.inputs:
        received = _received(backward, results, lambda value: rows if _same_rows(value, first) else None)
    if backward and is_recorded and rows is None and not call.is_module:  # of a layer the gradients are sums
        passed = _passed(backward, ordered)
    wanted = [value.requires_grad is not False for value in ordered if value.floating]
    again = dataclasses.replace(again, received=received, wanted=wanted)
    complete = is_recorded and all(value.has_values for value in results)
    complete = complete and (rows is None or all(_same_rows(value, first) for value in results))
    return Operation(
        call.name,
        _label(call),
        again,
        reference,
        results=[tensor_of(value, "", rows) for value in results] if complete else (),
        passed=without_shared(again.tensors, passed),
        autocast=_autocast(name, ordered, results),
        on_device=not (call.is_module and functions),
    )


def _received(
    backward: Call, results: list[Value], rows: Callable[[Value], int | None]
) -> list[Tensor | None]:
    """Return the gradients of the results, of their first rows alone where `rows` says so."""
    values = (backward.inputs.get(str(place)) for place in range(len(results)))
    return [
        tensor_of(value, f"{backward.name} {place}", rows(value)) if value and value.dtype else None
        for place, value in enumerate(values)
    ]


def _passed(backward: Call, ordered: list[Value]) -> list[Tensor | None]:
    """Return the recorded gradients of the floating inputs."""
    values = (backward.outputs.get(str(place)) for place in range(len(ordered)))
    return [
        load(value) if value is not None and value.has_values else None
        for value, given in zip(values, ordered, strict=True)
        if given.floating
    ]


def _check_kind(call: Call, functions: bool) -> None:
    """Raise NotReplayableError for a module that is no layer, or whose functions are recorded, and without values."""
    if call.is_module:
        try:
            recorded_function(call)
        except NotReplayableError as error:
            raise NotReplayableError(WITHIN) from error
        if functions and not all(value.has_values for value in call.values if value.dtype):
            raise NotReplayableError(WITHIN)


def _label(call: Call) -> str:
    if not call.is_module:
        return call.path
    return f"layer {str(call.settings.get('class')).rpartition('.')[2] or call.type}"


def _autocast(name: str, inputs: list[Value], results: list[Value]) -> torch.dtype | None:
    """Return the dtype of autocast, where the dtype of the result shows that it was on."""
    if name in CONVERSIONS:
        return None
    given, made = (
        {getattr(torch, value.dtype.removeprefix("torch.")) for value in values if value.floating}
        for values in (inputs, results)
    )
    low = [dtype for dtype in LOW if dtype in given | made]
    if not low or not given or not made:
        return None
    usual = given.pop()
    mixed = bool(given)
    for dtype in given:
        usual = torch.promote_types(usual, dtype)
    return low[0] if made != {usual} or (mixed and "norm" in name) else None


# -- the first rows of large calls


def _first_rows(call: Call, tensors: list[Value]) -> int | None:
    """Return how many rows of a call have at most LARGEST elements; None for all of them.

    NotReplayableError where the rows depend on each other. The elements of attention are those of its scores.
    """
    size, first = sum(value.count for value in tensors), tensors[0]
    if call.path.endswith("scaled_dot_product_attention") and len(tensors) > 1 and len(first.shape) > 1:
        size = max(size, math.prod(first.shape[:-1]) * tensors[1].shape[-2])
    if size <= LARGEST:
        return None
    name = _plain_name(call.path.rpartition(".")[2])
    if name in (*FIRST, *ALL) and first.shape and not call.is_module:
        shared = sum(value.count for value in tensors if not _has_rows(name, value, first))
        count = (LARGEST - shared) * first.shape[0] // max(size - shared, 1)
        if count > 0:
            return count
    raise NotReplayableError(f"large: over {LARGEST:,} elements")


def _plain_name(name: str) -> str:
    """Return a name without the marks of operators and of writing in place: "add" of "__iadd__"."""
    return name.strip("_").removeprefix("i") if name.startswith("__i") else name.strip("_")


def _same_rows(value: Value, first: Value) -> bool:
    return value.shape[:1] == first.shape[:1]


def _has_rows(name: str, value: Value, first: Value) -> bool:
    """Return whether an argument has the rows of the first one."""
    alike = len(value.shape) == len(first.shape) or name == "cross_entropy"
    return value is first or (name in ALL and alike and _same_rows(value, first))


# -- values


def tensor_of(value: Value, name: str, rows: int | None = None) -> Tensor:
    """Return the recorded tensor, or a generated one of the same shape, dtype and range.

    name: seeds the numbers. rows: the first of them alone.
    """
    if value.has_values:
        return load(value)[:rows] if rows else load(value)
    return generated(dataclasses.replace(value, shape=(rows, *value.shape[1:])) if rows else value, name)


def generated(value: Value, name: str) -> Tensor:
    """Return numbers of the shape, dtype, range, mean and norm of a recorded tensor, with as many NaN and Inf.

    Floating numbers are normal, cut at the recorded minimum and maximum, which both occur. Integers are uniform in the
    range. Square truth values, and square scores with -inf, are causal. Equal on every machine for the same name.
    """
    dtype = getattr(torch, value.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex:
        raise NotReplayableError(f"values of {value.dtype} are not generated")
    draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    shape = value.shape
    square = len(shape) > 1 and shape[-1] == shape[-2]
    if dtype == torch.bool:
        if value.lowest or not value.highest:
            return torch.full(shape, bool(value.lowest))
        return torch.ones(shape).tril().bool() if square else torch.randint(2, shape, generator=draws).bool()
    if not dtype.is_floating_point:
        low, high = int(value.lowest or 0), int(value.highest or 0)
        return _with_ends(torch.randint(low, high + 1, shape, generator=draws).double(), low, high).to(dtype)
    ends = [number for number in (value.lowest, value.highest) if _is_finite(number)]
    mean = value.mean if _is_finite(value.mean) else 0.0
    spread = (ends[-1] - ends[0]) / 6 if len(ends) == 2 else 1.0
    if _is_finite(value.norm) and value.count:
        spread = math.sqrt(max(value.norm**2 / value.count - mean**2, 0.0))
    numbers = torch.randn(shape, generator=draws, dtype=torch.float64) * spread + mean
    if len(ends) == 2:
        numbers = _with_ends(numbers.clamp(*ends), *ends)
    if value.lowest == -math.inf and square:  # scores, or a mask of 0 and -inf
        numbers = numbers if value.highest else torch.zeros_like(numbers)
        return numbers.masked_fill(torch.ones(shape[-2:], dtype=torch.bool).triu(1), -math.inf).to(dtype)
    flat = numbers.view(-1)
    infinity = -math.inf if value.lowest == -math.inf else math.inf
    bad = [math.nan] * (value.nan_count or 0) + [infinity] * (value.inf_count or 0)
    flat[: len(bad)] = torch.tensor(bad[: len(flat)], dtype=torch.float64)
    return numbers.to(dtype)


def _is_finite(number: float | None) -> TypeGuard[float]:
    return number is not None and math.isfinite(number)


def _with_ends(numbers: Tensor, low: float, high: float) -> Tensor:
    """Put both ends of the range where the smallest and the largest number are."""
    flat = numbers.contiguous().view(-1)
    if flat.numel():
        flat[int(flat.argmin())], flat[int(flat.argmax())] = low, high
    return flat.view(numbers.shape)
