"""Record the calls of torch.autograd.Function, and check them by the same class in float64, forward and backward."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import Function

from numerics.describe import tensors_in
from numerics.errors import NumericsError
from numerics.oracle.check import random_gradients
from numerics.oracle.operation import RECORDED, Operation
from numerics.oracle.results import Skipped
from numerics.oracle.steps.custom_calls import FILE


def custom_operations(folder: Path, prefix: str = "") -> Iterator[Operation | Skipped]:
    """Yield the calls of custom functions of a rank's folder, or why one cannot be checked.

    The gradients of the results are generated. NumericsError where the file cannot be read.
    """
    file = folder / FILE
    if not file.exists():
        return
    try:
        rows: list[dict[str, Any]] = torch.load(file, map_location="cpu", weights_only=True)
        found = [_operation(row, prefix) for row in rows]
    except (RuntimeError, TypeError, KeyError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise NumericsError(f"{file} cannot be loaded: {reason}; fix: record the step again") from error
    yield from found


def _operation(row: dict[str, Any], prefix: str) -> Operation | Skipped:
    name, label = prefix + row["name"], row["label"]
    if row["why"]:
        return Skipped(name, label, row["why"])
    kind = _class(row["module"], row["qualname"])
    if kind is None:
        return Skipped(
            name, label, f"custom function that cannot be imported: {row['module']}.{row['qualname']}"
        )
    if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors_in(row["args"])):
        return Skipped(name, label, "no floating tensor")
    operation = Operation(
        name, label, kind.apply, row["args"], wanted=row["wanted"], values=RECORDED, results=row["results"]
    )
    received = random_gradients(operation) if row["differentiable"] else None
    return dataclasses.replace(operation, received=received)


def _class(module: str, qualname: str) -> type[Function] | None:
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found if isinstance(found, type) and issubclass(found, Function) else None
