"""The operations of a recorded step: its calls of functions, and of single layers of torch.nn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numerics.compare.read_record import find_records, read_record
from numerics.compare.step_record import Call, StepRecord, Value
from numerics.oracle.generated_inputs import FirstRows, first_rows, tensor_of
from numerics.record.recorded_step import backward_name
from numerics.rounding.operation_checks import GENERATED, RECORDED, Operation, Skipped
from numerics.rounding.optimizer_checks import custom_operations, step_operations
from numerics.rounding.replayed_calls import (
    LARGEST,
    STAND_INS,
    NotReplayableError,
    arguments,
    recorded_function,
    without_shared,
)
from numerics.rounding.within_rounding import FunctionCall

WITHIN = "a module: the recorded calls within it are checked"
LOST = "on recorded values, whose files are missing"
LOW = (torch.bfloat16, torch.float16)
CONVERSIONS = ("to", "type", "type_as", "float", "half", "bfloat16", "double", "copy_")
# Results depend on the order of writes where an index repeats, as a generated one does.
ORDERED = ("scatter", "scatter_", "index_copy", "index_copy_", "index_put", "index_put_", "__setitem__")


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
                operation = _operation(call, record, functions)
            except NotReplayableError as reason:
                yield Skipped(prefix + call.name, _label(call), str(reason))
                continue
            yield dataclasses.replace(operation, name=prefix + call.name)
            used = (*call.parameters.values(), *call.inputs.values(), *call.outputs.values())
            if any(value.file and not value.has_values for value in used):
                yield Skipped(prefix + call.name, _label(call), LOST)
        yield from custom_operations(folder, prefix)
        yield from step_operations(folder, prefix)


def _operation(call: Call, record: StepRecord, functions: bool) -> Operation:
    """Return the operation of a call. NotReplayableError has the reason where there is none."""
    function = _function(call, functions)
    reference = STAND_INS.get(call.path)
    if reference is not None:
        _, space, operation = call.path.split(".")
        function = getattr(getattr(torch.ops, space), operation)
    name = call.path.rpartition(".")[2]
    used = [value for value in (*call.parameters.values(), *call.inputs.values()) if value.dtype]
    is_recorded = all(value.has_values for value in used)
    if reason := _unusable(used):
        raise NotReplayableError(reason)
    if not is_recorded and name in ORDERED:
        raise NotReplayableError("a generated index may repeat")
    rows = first_rows(name, call, _size(call, used), LARGEST)
    if rows is None:
        raise NotReplayableError(f"large: over {LARGEST:,} elements")
    tensors = {
        place: tensor_of(value, f"{call.name} {place}", rows.of_input(value))
        for place, value in call.inputs.items()
        if value.dtype
    }
    args, kwargs = arguments(call.raw, tensors)
    ordered = [value for value in call.inputs.values() if value.dtype]
    if call.is_module:
        args = [
            {place: tensor_of(value, f"{call.name} {place}") for place, value in call.parameters.items()},
            *args,
        ]
        ordered = [*call.parameters.values(), *ordered]
    results = [value for value in call.outputs.values() if value.dtype]
    backward = record.calls.get(backward_name(call.name))
    received = _received(backward, results, rows) if backward and backward.inputs else None
    wanted = [value.requires_grad is not False for value in ordered if value.floating]
    complete = is_recorded and bool(results) and all(value.has_values for value in results)
    again = FunctionCall(function, args, kwargs, received, wanted)
    passed = _passed(backward, ordered, call) if is_recorded and rows.count is None else ()
    return Operation(
        call.name,
        _label(call),
        again,
        reference,
        values=RECORDED if is_recorded else GENERATED,
        results=[tensor_of(value, "", rows.of_result(value)) for value in results]
        if complete and all(map(rows.has_result, results))
        else (),
        passed=without_shared(again.tensors, passed),
        autocast=_autocast(name, ordered, results),
        on_device=not (call.is_module and functions),
    )


def _function(call: Call, functions: bool) -> Any:
    """Return the function of a call. functions: whether the record has functions, with those of a module."""
    if not call.is_module:
        return recorded_function(call.path)
    known = [*call.parameters.values(), *call.inputs.values(), *call.outputs.values()]
    try:
        found = recorded_function(str(call.settings.get("class")), call.settings)
    except NotReplayableError as error:
        raise NotReplayableError(WITHIN) from error
    if functions and not all(value.has_values for value in known if value.dtype):
        raise NotReplayableError(WITHIN)
    return found


def _unusable(used: list[Value]) -> str:
    """Return why inputs cannot be loaded or generated; "" where they can."""
    if any(value.layout == "nested" for value in used):
        return "nested tensors"
    if any(value.unknown for value in used):
        return "values of unknown range"
    return "" if any(value.floating for value in used) else "no floating tensor"


def _label(call: Call) -> str:
    if not call.is_module:
        return call.path
    return f"layer {str(call.settings.get('class')).rpartition('.')[2] or call.type}"


def _size(call: Call, used: list[Value]) -> int:
    """Return the elements of a call; for attention, those of its scores."""
    size = sum(value.count for value in used)
    if call.path.endswith("scaled_dot_product_attention") and len(used) > 1 and len(used[0].shape) > 1:
        size = max(size, math.prod(used[0].shape[:-1]) * used[1].shape[-2])
    return size


def _received(backward: Call, results: list[Value], rows: FirstRows) -> list[Tensor | None]:
    """Return the gradients of the results, of their first rows alone where `rows` says so."""
    values: Mapping[str, Value] = backward.inputs
    found = [values.get(str(place)) for place in range(len(results))]
    return [
        tensor_of(value, f"{backward.name} {place}", rows.of_result(value)) if value and value.dtype else None
        for place, value in enumerate(found)
    ]


def _passed(backward: Call | None, ordered: list[Value], call: Call) -> list[Tensor | None]:
    """Return the recorded gradients of the floating inputs; none for a layer, whose weights' gradients are a sum."""
    if backward is None or call.is_module:
        return []
    found = [backward.outputs.get(str(place)) for place in range(len(ordered))]
    return [
        tensor_of(value, "") if value is not None and value.has_values else None
        for value, given in zip(found, ordered, strict=True)
        if given.floating
    ]


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
