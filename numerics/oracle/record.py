"""The operations of a recorded step: its calls of functions, and of single layers of torch.nn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numerics.compare.records import find_records, read_record
from numerics.compare.table.step_record import Call, StepRecord, Value
from numerics.oracle.beside import custom_operations, step_operations
from numerics.oracle.inputs import FirstRows, first_rows, tensor_of
from numerics.oracle.operation import GENERATED, RECORDED, Operation
from numerics.oracle.results import Skipped
from numerics.oracle.rounding_model.linear_algebra import DECOMPOSITIONS
from numerics.record.function_calls import OVERWRITING
from numerics.record.recorded_step import backward_name
from numerics.rounding.replayed_calls import LARGEST, NotReplayableError, arguments, recorded_function


def linear_pointwise(x: Tensor, weight: Tensor, bias: Tensor | None, after: str, *settings: Any) -> Tensor:
    """Compute oneDNN's linear layer, which takes no float64."""
    if after != "none":
        raise NotReplayableError(f"no definition of {after} after a linear layer")
    return torch.nn.functional.linear(x, weight, bias)


REFERENCES = {"mkldnn._linear_pointwise": linear_pointwise}  # of operations that take no float64
RANDOM = (
    "dropout",
    "rand",
    "bernoulli",
    "multinomial",
    "normal",
    "uniform",
    "exponential",
    "rrelu",
    "gumbel",
    "poisson",
)
WITHIN = "a module: the recorded calls within it are checked"
LOW = (torch.bfloat16, torch.float16)
LOST = "on recorded values, whose files are missing"
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
            if operation is None:
                yield Skipped(prefix + call.name, _label(call), WITHIN)
            else:
                yield dataclasses.replace(operation, name=prefix + call.name)
                used = (*call.parameters.values(), *call.inputs.values(), *call.outputs.values())
                if any(value.file and not value.has_values for value in used):
                    yield Skipped(prefix + call.name, _label(call), LOST)
        yield from custom_operations(folder, prefix)
        yield from step_operations(folder, prefix)


def _operation(call: Call, record: StepRecord, functions: bool) -> Operation | None:
    """Return the operation of a call; None for a module of several layers, or whose functions were recorded."""
    if call.is_module:
        try:
            compute = recorded_function(str(call.settings.get("class")), call.settings)
            name = str(call.settings.get("class")).rpartition(".")[2].lower()
        except NotReplayableError:
            return None
        recorded = all(
            value.has_values for value in (*call.parameters.values(), *call.inputs.values()) if value.dtype
        )
        if functions and not (
            recorded and all(value.has_values for value in call.outputs.values() if value.dtype)
        ):
            return None
    else:
        compute, name = _function(call)
    if _is_random(name, call):
        raise NotReplayableError("random")
    values = {**call.parameters, **call.inputs} if not call.is_module else call.inputs
    used = [value for value in (*call.parameters.values(), *call.inputs.values()) if value.dtype]
    if any(value.layout == "nested" for value in used):
        raise NotReplayableError("nested tensors")
    if any(value.unknown for value in used):
        raise NotReplayableError("values of unknown range")
    if not any(value.floating for value in used):
        raise NotReplayableError("no floating tensor")
    size = _size(call, used)
    rows = first_rows(name, call, size, LARGEST)
    if rows is None:
        raise NotReplayableError(f"large: over {LARGEST:,} elements")
    is_recorded = all(value.has_values for value in used)
    if not is_recorded and name in ORDERED:
        raise NotReplayableError("a generated index may repeat")
    tensors = {
        place: tensor_of(value, f"{call.name} {place}", rows.of_input(value))
        for place, value in values.items()
        if value.dtype
    }
    args, kwargs = arguments(call.raw, tensors)
    ordered = [value for value in call.inputs.values() if value.dtype]
    results = [value for value in call.outputs.values() if value.dtype]
    unique = call.path.rpartition(".")[2] not in DECOMPOSITIONS or not call.path.startswith("Torch.linalg.")
    if call.is_module:
        state = {place: tensor_of(value, f"{call.name} {place}") for place, value in call.parameters.items()}
        args = [state, *args]
        ordered = [*call.parameters.values(), *ordered]
    backward = record.calls.get(backward_name(call.name))
    received = (
        _by_place(backward.inputs, results, backward.name, rows) if backward and backward.inputs else None
    )
    has_results = unique and is_recorded and _complete(results) and all(map(rows.has_result, results))
    return Operation(
        call.name,
        _label(call),
        compute,
        args,
        kwargs,
        reference=REFERENCES.get(name),
        received=received if unique else None,
        wanted=[value.requires_grad is not False for value in ordered if value.floating],
        values=RECORDED if is_recorded else GENERATED,
        results=[tensor_of(value, "", rows.of_result(value)) for value in results] if has_results else (),
        passed=_passed(backward, ordered, call) if unique and is_recorded and rows.count is None else (),
        autocast=_autocast(name, ordered, results),
        on_device=not (call.is_module and functions),
    )


def _function(call: Call) -> tuple[Any, str]:
    """Return a function of torch, or an operation of torch.ops such as "mkldnn._linear_pointwise", and its name."""
    name = call.path.removeprefix("Torch.")
    space, _, operation = name.partition(".")
    if call.path.startswith("Torch.linalg.") and operation in DECOMPOSITIONS:
        return DECOMPOSITIONS[operation], operation
    found = getattr(getattr(torch.ops, space, None), operation, None) if name in REFERENCES else None
    return (
        (found, name) if found is not None else (recorded_function(call.path), call.path.rpartition(".")[2])
    )


def _label(call: Call) -> str:
    if not call.is_module:
        return call.path
    return f"layer {str(call.settings.get('class')).rpartition('.')[2] or call.type}"


def _is_random(name: str, call: Call) -> bool:
    if name in OVERWRITING - {"copy_", "fill_"}:
        return True
    if not any(word in name for word in RANDOM):
        return False
    plain = [value.plain for value in call.inputs.values() if not value.dtype]
    plain += [call.settings.get("training"), call.settings.get("p")]
    off = "dropout" in name and (
        True not in plain or 0.0 in [part for part in plain if isinstance(part, float)]
    )
    return not off


def _size(call: Call, used: list[Value]) -> int:
    """Return the elements of a call; for attention, those of its scores."""
    size = sum(value.count for value in used)
    if call.path.endswith("scaled_dot_product_attention") and len(used) > 1 and len(used[0].shape) > 1:
        size = max(size, math.prod(used[0].shape[:-1]) * used[1].shape[-2])
    return size


def _complete(values: list[Value]) -> bool:
    return bool(values) and all(value.has_values for value in values)


def _by_place(
    values: Mapping[str, Value], results: list[Value], name: str, rows: FirstRows
) -> list[Tensor | None]:
    """Return the gradients of the results, of their first rows alone where `rows` says so."""
    found = [values.get(str(place)) for place in range(len(results))]
    return [
        tensor_of(value, f"{name} {place}", rows.of_result(value))
        if value is not None and value.dtype
        else None
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
