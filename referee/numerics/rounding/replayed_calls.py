"""Run a recorded call again: as a function of its recorded arguments, in float64, judged by `within_rounding`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from referee.errors import described
from referee.numerics.rounding.within_rounding import Error, is_number, within_rounding

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


@dataclass(frozen=True)
class RecordedCall:
    """A recorded call with its loaded tensors."""

    label: (
        str  # of a function, as "Functional.gelu"; the class of a layer, as "torch.nn.modules.linear.Linear"
    )
    raw: Mapping[str, Any]  # the row of dump.json, with "input_args" and "input_kwargs"
    inputs: Mapping[str, Tensor]  # by place, as "0", "1.0", "weight"
    results: Sequence[Tensor]  # in the order of their places
    settings: Mapping[str, Any] | None = None  # of a layer; None for a function
    parameters: Mapping[str, Tensor] = field(default_factory=dict)  # of a layer, and its buffers
    received: Sequence[Tensor | None] | None = (
        None  # of a function, gradients of the results; None without a backward
    )
    passed: Sequence[Tensor | None] = ()  # of a function, gradients of the floating inputs


def replay(call: RecordedCall) -> list[Error]:
    """Return the error of each recorded result and gradient of a call, in units of rounding of its recorded inputs.

    One error with why == RANDOM where the call draws random numbers. "gradient 0" is that of the first floating input.
    NotReplayableError says why a call cannot be replayed: no function or single layer of torch, an argument that a
    record does not hold, or what the call raises in float64.
    """
    function = recorded_function(call.label, call.settings)
    args, kwargs = arguments(call.raw, call.inputs)
    if call.settings is not None:
        args = [dict(call.parameters), *args]
    passed = without_shared([tensor for tensor in call.inputs.values() if is_number(tensor)], call.passed)
    try:
        return within_rounding(
            function,
            args,
            kwargs,
            results=call.results,
            received=call.received,
            passed=passed,
            wanted=[gradient is not None for gradient in passed],
        )
    except Exception as error:  # torch raises many kinds for arguments of another dtype
        raise NotReplayableError(f"{described(error)} in float64") from error


def without_shared(inputs: Sequence[Tensor], passed: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return recorded gradients without those of equal inputs: a tensor that is passed twice has one sum of two."""

    def is_shared(place: int) -> bool:
        mine = inputs[place]
        others = (tensor for other, tensor in enumerate(inputs) if other != place)
        return any(tensor.shape == mine.shape and torch.equal(tensor, mine) for tensor in others)

    return [
        None if gradient is None or is_shared(place) else gradient for place, gradient in enumerate(passed)
    ]


def recorded_function(label: str, settings: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return the function of a recorded call. That of a layer takes its parameters and buffers first, by name."""
    group, _, name = label.rpartition(".")
    if settings is not None:
        return layer_function(label, settings)
    if label in STAND_INS:
        return STAND_INS[label]
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
