"""Copy the arguments and results of the calls of torch.autograd.Function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from numerics.describe import SCALARS, is_wrapped, tensors_in

FILE = "custom_functions.pt"
Quietly = Callable[
    [], AbstractContextManager[None]
]  # within it the recorder records nothing: copies are its work
LARGEST = 1 << 22  # elements of a call


class CustomCalls:
    """Copy every call of a custom function of this process between start() and stop()."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._original: Any = None
        self._depth = 0

    def start(self, quietly: Quietly) -> None:
        self.rows, self._counts = [], Counter()
        if self._original is not None:
            return
        self._original = original = Function.__dict__["apply"]
        capture = self

        def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
            if (
                torch._C._current_graph_task_id() != -1 or capture._depth
            ):  # in backward, or within another one
                return original.__func__(cls, *args, **kwargs)
            with quietly():
                row = capture._begin(cls, args, kwargs)
            capture._depth += 1
            try:
                output = original.__func__(cls, *args, **kwargs)
            finally:
                capture._depth -= 1
            with quietly():
                capture._end(row, output)
            return output

        Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]

    def stop(self) -> None:
        if self._original is not None:
            Function.apply = self._original  # type: ignore[method-assign]
            self._original = None

    def _begin(self, cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        label = cls.__qualname__.replace("<locals>.", "")
        number = self._counts[label]
        self._counts[label] += 1
        tensors = [
            tensor for tensor in tensors_in(list(args)) if tensor.is_floating_point() or tensor.is_complex()
        ]
        row: dict[str, Any] = {
            "name": f"Function.{label}.{number}.forward", "label": f"Function.{label}", "module": cls.__module__,
            "qualname": cls.__qualname__, "why": "", "args": [], "results": [],
            "wanted": [tensor.requires_grad for tensor in tensors],
            "differentiable": torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        }  # fmt: skip
        if kwargs:
            row["why"] = "custom function with arguments by name"
        elif strange := next((part for part in args if not _plain(part)), None):
            row["why"] = f"custom function with an argument of type {type(strange).__name__}"
        elif sum(tensor.numel() for tensor in tensors_in(list(args))) > LARGEST:
            row["why"] = f"large: over {LARGEST:,} elements"
        else:
            row["args"] = [_copied(part) for part in args]
        self.rows.append(row)
        return row

    def _end(self, row: dict[str, Any], output: Any) -> None:
        found = tensors_in(list(output) if isinstance(output, tuple) else output)
        if not row["why"] and all(_dense(tensor) for tensor in found):
            row["results"] = [_copied(tensor) for tensor in found]

    def write(self, folder: Path) -> None:
        """Write FILE into the folder of a step and rank; nothing where no custom function ran."""
        if self.rows:
            torch.save(self.rows, folder / FILE)
        self.rows = []


def _dense(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized or is_wrapped(tensor))


def _plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return _dense(value)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return all(map(_plain, value))
    return isinstance(value, (*SCALARS, torch.Size, torch.dtype))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        with torch.no_grad():
            return value.detach().cpu().clone(memory_format=torch.contiguous_format)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(map(_copied, value))
    return value
