"""Functions of torch that F.multi_head_attention_forward calls, which a TorchFunctionMode does not see."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

Replacement = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
PLAIN = (Tensor, nn.Parameter)
ORIGINAL: Any = F.multi_head_attention_forward


def original(func: Any) -> Any:
    """Return the function of torch of which `with_replaced` returned a copy; any other function itself."""
    return getattr(func, "numerics_original", func)


def with_replaced(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    replacements: Mapping[str, Replacement],
) -> Callable[..., Any]:
    """Return multi_head_attention_forward with functions replaced inside; any other function as it is.

    The result is a copy of torch's code with other globals, so that no other caller is changed. A function that is
    replaced already stays so. A call with subclasses of Tensor, which may replace the function themselves, stays too.
    """
    if original(func) is not ORIGINAL or not isinstance(func, FunctionType):
        return func
    given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    if any(type(one) not in PLAIN for one in given):
        return func
    names = dict(func.__globals__)
    for name, replacement in replacements.items():
        inner = names.get(name)
        if callable(inner) and inner is ORIGINAL.__globals__.get(name):
            names[name] = _replaced(inner, replacement)
    copy: Any = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__, copy.__module__, copy.numerics_original = func.__kwdefaults__, F.__name__, ORIGINAL
    names[func.__name__] = copy  # what a further mode receives
    return copy  # type: ignore[no-any-return]


def _replaced(inner: Callable[..., Any], replacement: Replacement) -> Callable[..., Any]:
    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(inner, args, kwargs)

    return call
