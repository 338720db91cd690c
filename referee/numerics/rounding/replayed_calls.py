"""A recorded call as a function of its recorded arguments, which can be run again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from referee.numerics.record.read_record import Call
from referee.numerics.rounding.within_rounding import FunctionCall

MODULES: dict[str, Any] = {
    "Functional": torch.nn.functional,
    "Tensor": torch.Tensor,
    "Torch": torch,
    "Torch.linalg": torch.linalg,
    "Torch.special": torch.special,
    "Torch.functional": torch.functional,
}
# The files of torch.nn.modules whose classes compute with their own parameters and settings alone.
LAYERS = (
    "activation",
    "batchnorm",
    "conv",
    "instancenorm",
    "linear",
    "normalization",
    "padding",
    "pooling",
    "sparse",
)
NOT_UNIQUE = ("qr", "eigh", "eig", "svd")  # their vectors have no unique signs
ABSENT = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")  # None where not recorded
LARGEST = 1 << 24  # elements; larger calls are not replayed


class NotReplayableError(Exception):
    """The reason why a call cannot be replayed."""


def function_call(call: Call, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> FunctionCall:
    """Return a recorded call with its arguments. tensors: by place. state: parameters and buffers of a layer.

    NotReplayableError for no function or single layer of torch, and for an argument that a record does not hold.
    """
    args, kwargs = arguments(call.raw, tensors)
    return FunctionCall(recorded_function(call), [dict(state), *args] if call.is_module else args, kwargs)


def without_shared(inputs: Sequence[Tensor], passed: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return recorded gradients without those of equal inputs: a tensor that is passed twice has one sum of two."""

    def is_shared(place: int) -> bool:
        mine = inputs[place]
        others = (tensor for other, tensor in enumerate(inputs) if other != place)
        return any(tensor.shape == mine.shape and torch.equal(tensor, mine) for tensor in others)

    return [
        None if gradient is None or is_shared(place) else gradient for place, gradient in enumerate(passed)
    ]


def recorded_function(call: Call) -> Callable[..., Any]:
    """Return the function of a recorded call. That of a layer takes its parameters and buffers first, by name."""
    if call.is_module:
        return layer_function(str(call.settings.get("class")), call.settings)
    if call.path in STAND_INS:
        return STAND_INS[call.path]
    group, _, name = call.path.rpartition(".")
    if name in NOT_UNIQUE:
        raise NotReplayableError("vectors without a unique sign")
    function = getattr(MODULES.get(group), name, None)
    if not callable(function):
        raise NotReplayableError("no function of torch")
    found: Callable[..., Any] = function
    return found


def linear_pointwise(x: Tensor, weight: Tensor, bias: Tensor | None, after: str, *settings: Any) -> Tensor:
    """Compute oneDNN's linear layer, which takes no float64."""
    if after != "none":
        raise NotReplayableError(f"no definition of {after} after a linear layer")
    return torch.nn.functional.linear(x, weight, bias)


STAND_INS: dict[str, Callable[..., Any]] = {"Torch.mkldnn._linear_pointwise": linear_pointwise}


def layer_function(kind: str, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return what computes a layer of torch.nn from its parameters and inputs.

    kind: its class, as "torch.nn.modules.linear.Linear". settings: its plain attributes.
    """
    package, _, name = kind.rpartition(".")
    layer_class: Any = getattr(sys.modules.get(package), name, None)
    if package not in [f"torch.nn.modules.{file}" for file in LAYERS] or name == "MultiheadAttention":
        raise NotReplayableError("no single layer of torch.nn")

    def compute(state: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        layer: nn.Module = layer_class.__new__(layer_class)
        nn.Module.__init__(layer)
        for place, value in settings.items():
            if place != "class":
                setattr(layer, place, tuple(value) if isinstance(value, list) else value)
        for place in (*state, *ABSENT):
            if not hasattr(layer, place):
                layer.register_buffer(place, state.get(place))
        return layer(*args, **kwargs)

    return compute


def arguments(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a row of dump.json. tensors: by place."""
    args = [argument(part, str(place), tensors) for place, part in enumerate(raw.get("input_args") or [])]
    named = raw.get("input_kwargs") or {}
    return args, {name: argument(part, name, tensors) for name, part in named.items()}


def argument(tree: Any, place: str, tensors: Mapping[str, Tensor]) -> Any:
    """Return a recorded argument. tensors: by place."""
    if tree is None:
        return None
    if isinstance(tree, list):
        return tuple(argument(part, f"{place}.{index}", tensors) for index, part in enumerate(tree))
    if not isinstance(tree, dict):
        return tree
    kind = tree.get("type")
    if not isinstance(kind, str):
        return {key: argument(part, f"{place}.{key}", tensors) for key, part in tree.items()}
    if place in tensors:
        return tensors[place]
    value = tree.get("value")
    if kind in ("int", "float", "bool", "str"):
        return value
    if kind == "torch.Size":
        return torch.Size(value or ())
    if kind == "slice" and isinstance(value, list) and len(value) == 3:
        return slice(*value)
    if kind == "ellipsis":
        return ...
    if kind == "torch.dtype":
        return getattr(torch, str(value).removeprefix("torch."))
    raise NotReplayableError(f"argument of type {kind}")
