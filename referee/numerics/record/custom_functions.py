"""Copy the arguments and results of the calls of torch.autograd.Function."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from referee.numerics.describe import SCALARS, is_dense, tensors_in
from referee.numerics.record.function_calls import recomputes

FILE = "custom_functions.pt"
LARGEST = 1 << 22  # elements of a call


class CustomCalls:
    """Copy the calls of custom functions, not those within another one or in backward."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._inside = False

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Copy every call of this process in the block."""
        self.rows, self._counts, self._inside = [], Counter(), False
        original = Function.__dict__["apply"]

        def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
            if recomputes() or self._inside:
                return original.__func__(cls, *args, **kwargs)
            with torch._C.DisableTorchFunction():  # copies are no calls of the step
                row = self._begin(cls, args, kwargs)
            self._inside = True
            try:
                output = original.__func__(cls, *args, **kwargs)
            finally:
                self._inside = False
            with torch._C.DisableTorchFunction():
                self._end(row, output)
            return output

        Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Function.apply = original  # type: ignore[method-assign]

    def _begin(self, cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        label = cls.__qualname__.replace("<locals>.", "")
        number = self._counts[label]
        self._counts[label] += 1
        given = tensors_in(list(args))
        tensors = [tensor for tensor in given if tensor.is_floating_point() or tensor.is_complex()]
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
        elif sum(tensor.numel() for tensor in given) > LARGEST:
            row["why"] = f"large: over {LARGEST:,} elements"
        else:
            row["args"] = [_copied(part) for part in args]
        self.rows.append(row)
        return row

    def _end(self, row: dict[str, Any], output: Any) -> None:
        found = tensors_in(list(output) if isinstance(output, tuple) else output)
        if not row["why"] and all(map(is_dense, found)):
            row["results"] = [_copied(tensor) for tensor in found]

    def write(self, folder: Path) -> None:
        """Write FILE into the folder of a step and rank; nothing where no custom function ran."""
        if self.rows:
            torch.save(self.rows, folder / FILE)
        self.rows = []


def _plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return is_dense(value)
    if type(value) in (list, tuple):
        return all(map(_plain, value))
    return isinstance(value, (*SCALARS, torch.Size, torch.dtype))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value
