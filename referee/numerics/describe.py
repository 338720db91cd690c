"""Describe arguments as msProbe's dump.json does, and read the values of every kind of tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

MOST_DEPTH = 10  # of nested arguments
SCALARS = (bool, int, float, str, type(None))
WITHOUT_FLOAT64 = {"mps"}  # types of devices; to convert a tensor there is a TypeError


def plain_values(tensor: Tensor) -> Tensor:
    """Return the detached values as a dense tensor: of a sparse or quantized one, too.

    Of a nested tensor the numbers, flat. NoValuesError where there are none.
    """
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.is_nested:
        return parts_of(tensor)[0].reshape(-1)
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


class NoValuesError(Exception):
    """The reason why the values of a tensor cannot be read."""


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return dense tensors that the detached values consist of, the numbers first.

    Nested: values, sizes, strides and offsets. A subclass that holds other tensors, such as DTensor: those, of this
    rank. Others: `plain_values`. NoValuesError for meta and fake tensors, for a subclass that does not show its
    tensors, and within vmap or grad, see `unwrapped`.
    """
    if is_wrapped(tensor):
        raise NoValuesError("a transform such as vmap wraps this tensor")
    tensor = tensor.detach()
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [part for name in names for part in parts_of(getattr(tensor, name))]
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        raise NoValuesError(f"a {'meta' if type(tensor) is Tensor else 'fake'} tensor has no values")
    if has_operations(type(tensor)):
        raise NoValuesError(f"{type(tensor).__name__} does not show its values")
    if tensor.is_nested:
        sizes, strides = tensor._nested_tensor_size(), tensor._nested_tensor_strides()
        return [tensor.values(), sizes, strides, tensor._nested_tensor_storage_offsets()]
    return [plain_values(tensor)]


def to_float64(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, on its device, or on the CPU where the device has no float64."""
    return (tensor.cpu() if tensor.device.type in WITHOUT_FLOAT64 else tensor).double()


def device_name(device_type: str, index: int = 0) -> str:
    """Return the name of a device. torch.mps has it in another place than other modules."""
    module: Any = torch.get_device_module(device_type)
    if hasattr(module, "get_device_name"):
        return str(module.get_device_name(index))
    named = getattr(getattr(torch.backends, device_type, None), "get_name", None)
    return str(named()) if named else device_type


def is_dense(tensor: Any) -> bool:
    """Return whether this is a tensor of torch's class that has all its elements in memory."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized or is_wrapped(tensor))


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a transform such as vmap or grad wraps the tensor."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


@contextlib.contextmanager
def unwrapped(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor itself, without the transforms that wrap it: within vmap that of all calls.

    In the block operations are not transformed, for they would wrap their results.
    """
    with torch._C._DisableFuncTorch():
        while is_wrapped(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        yield tensor


def has_operations(kind: type) -> bool:
    """Return whether a subclass of Tensor has its implementation of operations."""
    method = getattr(kind, "__torch_dispatch__", None)
    disabled = torch._C._disabled_torch_dispatch_impl
    return kind not in (Tensor, nn.Parameter) and method is not None and method is not disabled


def describe(value: Any, of_tensor: Callable[[Tensor, str], Any], suffix: str = "", depth: int = 0) -> Any:
    """Describe an argument: tensors by `of_tensor`(tensor, place), containers by their elements, others by their type.

    suffix: the place of the value, as in "0.hidden".
    """
    if isinstance(value, Tensor):
        return of_tensor(value, suffix)
    if isinstance(value, bool | int | float | str | type(None)):
        return None if value is None else {"type": type(value).__name__, "value": value}
    if isinstance(value, torch.Size):
        return {"type": "torch.Size", "value": list(value)}
    if isinstance(value, torch.dtype | torch.device | torch.memory_format):
        return {"type": f"torch.{type(value).__name__}", "value": str(value)}
    if isinstance(value, slice):
        return {"type": "slice", "value": [_plain(part) for part in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"type": "ellipsis", "value": "..."}
    elements = _elements(value) if depth < MOST_DEPTH else None
    if elements is None:
        return {"type": f"{type(value).__module__}.{type(value).__qualname__}"}
    found = {
        key: describe(part, of_tensor, f"{suffix}.{key}" if suffix else str(key), depth + 1)
        for key, part in elements.items()
    }
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return list(found.values())
    return {str(key): part for key, part in found.items()}


def _elements(value: Any) -> dict[Any, Any] | None:
    """Return the elements of a container, or the fields of an object that has names for them; None of others."""
    if isinstance(value, torch.Size):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return dict(value.items()) if hasattr(value, "items") else None


def _plain(value: Any) -> Any:
    return value if isinstance(value, SCALARS) else str(value)


def tensors_in(value: Any, depth: int = 0) -> list[Tensor]:
    """Return the tensors of nested arguments, in the order of `describe`."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, SCALARS) or depth >= MOST_DEPTH:
        return []
    try:
        elements = _elements(value) or {}
    except Exception:  # of an object whose attributes fail, which `describe` names
        return []
    return [tensor for part in elements.values() for tensor in tensors_in(part, depth + 1)]


def module_settings(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module, functions among them by name: epsilon, dropout, activation.

    Only public ones, and no hooks or flags of torch's.
    """
    found: dict[str, Any] = {"class": f"{type(module).__module__}.{type(module).__qualname__}"}
    for name, value in vars(module).items():
        if name.startswith("_") or name in ("training", "call_super_init", "dump_patches"):
            continue
        if isinstance(value, SCALARS):
            found[name] = value
        elif isinstance(value, list | tuple) and all(isinstance(part, SCALARS) for part in value):
            found[name] = list(value)
        elif isinstance(value, torch.dtype | torch.device):
            found[name] = str(value)
        elif callable(value) and hasattr(value, "__qualname__"):
            found[name] = f"{value.__module__}.{value.__qualname__}"
    found["training"] = module.training
    return found
