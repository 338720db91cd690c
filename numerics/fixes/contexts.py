"""Contexts of a fixed computation: other parameters of a module, wider casts, replaced functions."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from numerics.fixes.multi_head import Replacement, with_replaced

CASTS = {
    "bfloat16": torch.bfloat16,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
}
STRUCTURE = (
    "_parameters",
    "_buffers",
    "_modules",
)  # attributes of a module that `swapped_tensors` replaces, or none


def narrower(dtype: Any, wide: torch.dtype) -> bool:
    """Whether dtype is a floating-point type of fewer bytes than `wide`."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < wide.itemsize


@contextlib.contextmanager
def swapped_tensors(
    module: nn.Module, others: Mapping[int, Tensor], keep_assigned: bool = False
) -> Iterator[None]:
    """Within the block, parameters and buffers of the module are replaced. others: id of a tensor -> another one.

    keep_assigned: buffers that the block assigns stay, in the format and on the device of the buffer before.
    """
    before = [(part, part._parameters, part._buffers) for part in module.modules()]
    try:
        for part, parameters, buffers in before:
            for attribute, tensors in (("_parameters", parameters), ("_buffers", buffers)):
                vars(part)[attribute] = {name: others.get(id(one), one) for name, one in tensors.items()}
        given = [dict(part._buffers) for part, _, _ in before]
        yield
        for (part, _, buffers), former in zip(before, given, strict=True):
            assigned = {name: one for name, one in part._buffers.items() if one is not former.get(name)}
            if keep_assigned:
                buffers |= {name: _as_before(one, buffers.get(name)) for name, one in assigned.items()}
    finally:
        for part, parameters, buffers in before:
            vars(part)["_parameters"], vars(part)["_buffers"] = parameters, buffers


def _as_before(value: Tensor | None, before: Tensor | None) -> Tensor | None:
    """Return an assigned buffer with the device and, of floating-point numbers, the format of the one before."""
    if value is None or before is None:
        return value
    both = value.is_floating_point() and before.is_floating_point()
    return value.to(before.device, before.dtype if both else value.dtype)


class ModuleState:
    """Buffers and attributes of a module before a call, for further computations of this call.

    Tensors without a gradient, generators of random numbers, lists, dicts and sets are copied, other objects shared.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parts = [
            (part, _copies(part._buffers), _copies(vars(part), without=STRUCTURE))
            for part in module.modules()
        ]

    @contextlib.contextmanager
    def restored(self, convert: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Within the block, the module is as before the call. convert: of the buffers. Changes within are discarded."""
        present = [(part, dict(vars(part))) for part, _, _ in self.parts]
        try:
            for (part, buffers, attributes), (_, now) in zip(self.parts, present, strict=True):
                structure = {name: now[name] for name in STRUCTURE if name in now}
                copies = {
                    name: one if one is None else convert(one) for name, one in _copies(buffers).items()
                }
                _set_attributes(part, structure | {"_buffers": copies} | _copies(attributes))
            yield
        finally:
            for part, values in present:
                _set_attributes(part, values)


def _copies(values: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, Any]:
    return {name: _copied(name, value) for name, value in values.items() if name not in without}


def _copied(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.clone()
    if isinstance(value, torch.Generator):
        return value.clone_state()
    is_plain = type(value) in (list, dict, set) and not name.startswith("_")  # torch's dicts begin with _
    return copy.copy(value) if is_plain else value


def _set_attributes(part: nn.Module, values: Mapping[str, Any]) -> None:
    vars(part).clear()
    vars(part).update(values)


@contextlib.contextmanager
def wide_defaults(wide: torch.dtype) -> Iterator[None]:
    """Within the block, new floating-point tensors have at least the type `wide`."""
    before = torch.get_default_dtype()
    if narrower(before, wide):
        torch.set_default_dtype(wide)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class WideCasts(TorchFunctionMode):
    """Casts to a narrower type, and autocast within the block, have no effect."""

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self.wide = wide

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        wide = self.wide
        args = tuple(wide if narrower(one, wide) else one for one in args)
        options = {name: wide if narrower(one, wide) else one for name, one in (kwargs or {}).items()}
        name = getattr(func, "__name__", "")
        if name in CASTS and narrower(CASTS[name], wide) and args and isinstance(args[0], Tensor):
            func, args = Tensor.to, (args[0], wide, *args[1:])
        with without_autocast(args):
            return func(*args, **options)


@contextlib.contextmanager
def without_autocast(arguments: Sequence[Any]) -> Iterator[None]:
    """Disable autocast for the devices of the tensors among the arguments."""
    devices = {one.device.type for one in arguments if isinstance(one, Tensor)} | {"cpu"}
    with contextlib.ExitStack() as stack:
        for device in sorted(devices - {"meta"}):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class ReplacedFunctions(TorchFunctionMode):
    """Calls of the named functions are replaced. called: names of all functions that were called."""

    def __init__(self, replacements: Mapping[str, Replacement], called: set[str]) -> None:
        super().__init__()
        self.replacements, self.called = replacements, called

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        self.called.add(name)
        if name in self.replacements and "out" not in kwargs:
            return self.replacements[name](func, args, kwargs)
        inner = {name: self._noted(name, one) for name, one in self.replacements.items()}
        return with_replaced(func, args, kwargs, inner)(*args, **kwargs)

    def _noted(self, name: str, replacement: Replacement) -> Replacement:
        def call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            self.called.add(name)
            return replacement(func, args, kwargs)

        return call


def function_name(func: Any) -> str:
    """Return the name of a function of torch: "matmul" for x @ y, too."""
    name = str(getattr(func, "__name__", ""))
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name
