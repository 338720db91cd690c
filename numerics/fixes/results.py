"""The tensors of a module's result, also within dataclasses and other objects, which torch's pytrees do not open."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

DEEPEST = 4  # objects within one another
CLOSED = (type, nn.Module, types.FunctionType, types.MethodType, types.ModuleType)
Build = Callable[[Sequence[Any]], Any]


def opened(value: Any, depth: int = 0) -> tuple[list[Any], Build]:
    """Return the leaves of a result, and a function that builds such a result of other leaves."""
    leaves, form = tree_flatten(value)
    parts = [_leaf(leaf, depth) for leaf in leaves]

    def build(flat: Sequence[Any]) -> Any:
        left = iter(flat)
        return tree_unflatten([make([next(left) for _ in inner]) for inner, make in parts], form)

    return [leaf for inner, _ in parts for leaf in inner], build


def _leaf(leaf: Any, depth: int) -> tuple[list[Any], Build]:
    fields = _fields(leaf) if depth < DEEPEST else {}
    if fields:
        inner, build = opened(fields, depth + 1)
        if any(isinstance(one, Tensor) for one in inner):
            return inner, lambda flat: _with(leaf, build(flat))
    return [leaf], lambda flat: flat[0]


def _fields(leaf: Any) -> dict[str, Any]:
    """Return the attributes of an object that can hold tensors."""
    if isinstance(leaf, (Tensor, Iterator, *CLOSED)):
        return {}
    if dataclasses.is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return dict(getattr(leaf, "__dict__", {}))


def _with(leaf: Any, fields: Mapping[str, Any]) -> Any:
    """Return a copy of an object with other attributes."""
    other = copy.copy(leaf)
    for name, value in fields.items():
        object.__setattr__(other, name, value)
    return other
