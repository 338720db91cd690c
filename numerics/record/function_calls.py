"""Observe the calls of torch's functions and tensor methods: their names, and whether they compute a value."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from numerics.describe import tensors_in

PREFIXES = {"torch.nn.functional.": "Functional.", "torch.Tensor.": "Tensor.", "torch.": "Torch."}
SILENT = {"backward", "requires_grad_", "register_hook", "retain_grad", "detach", "detach_", "zero_", "set_"}
DRAWING = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "trunc_normal_"}
OVERWRITING = {"copy_", "fill_", *DRAWING}
# Their content is arbitrary.
UNSET = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# torch gives x + y and x.add(y) one name; msProbe's is that of the operator.
OPERATORS = {"div": "__truediv__", "remainder": "__mod__"}
OPERATORS |= {name: f"__{name}__" for name in ("add", "sub", "mul", "matmul", "gt", "ge", "lt", "le", "ne")}
OPERATORS |= {f"{name}_": f"__i{name}__" for name in ("add", "sub", "mul")}
DEEPEST_STACK = 12  # frames
HERE = str(Path(__file__).parents[1])


class FunctionCalls(TorchFunctionMode):
    """Report the calls of torch's functions and of tensor methods to a Recorder."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        label = _label(func) if self.recorder.recording() else ""
        if not label:
            return func(*args, **kwargs)
        before = tensors_in([list(args), kwargs])
        call = self.recorder.open_call(label, "{}.forward", (tuple(args), kwargs))
        output = func(*args, **kwargs)
        made = tensors_in(output)
        name = label.rpartition(".")[2]
        in_place = (name[-1:] == "_" != name[-2:-1]) or name.startswith("__i") or "out" in kwargs
        computes = in_place or not all(_is_view(tensor, before) for tensor in made)
        if call.recorded and not (made and computes):
            self.recorder.forget(call)
        else:
            self.recorder.close_call(call, output)
        return output


def _is_view(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Return whether the tensor has the memory of one of the others: a view has their content."""
    place = _storage(tensor)
    return bool(place and tensor.numel()) and place in map(_storage, others)


def _storage(tensor: Tensor) -> int | None:
    """Return the address of the tensor's memory; None where it has none: meta, sparse, nested, functorch's."""
    try:
        return None if tensor.is_meta else tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None


def _label(func: Any) -> str:
    """Return the name of a torch function, as in "Functional.linear"; empty for one that is not recorded."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__") or name in SILENT | UNSET:
        return ""
    full = resolve_name(getattr(func, "numerics_original", func))
    if not full:
        return f"Torch.{name}" if name else ""
    prefix = next((prefix for prefix in PREFIXES if full.startswith(prefix)), "")
    name = str(full).removeprefix(prefix)
    if prefix == "torch.Tensor.":
        name = OPERATORS.get(name, name)
    return PREFIXES.get(prefix, "Torch.") + name


def without_overwritten(label: str, args: Sequence[Any]) -> list[Any]:
    """Return the arguments, without the content of one that the function only overwrites."""
    given = list(args)
    if label.rpartition(".")[2] in OVERWRITING and given and isinstance(given[0], Tensor):
        given[0] = torch.empty_like(given[0], device="meta")
    return given


def call_stack() -> list[str]:
    """Return the callers, innermost first, without those in torch and in this package."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < DEEPEST_STACK:
        path = frame.f_code.co_filename
        if not path.startswith(HERE) and f"{os.sep}torch{os.sep}" not in path:
            lines.append(f"File {path}, line {frame.f_lineno}, in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines
