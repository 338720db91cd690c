"""Replay a recorded function or layer in float64 on its recorded inputs, and measure its result in units of rounding.

The unit of an element is what rounding of the result and of the inputs does to it:

    unit_i^2 = (eps |y_i|)^2 + (spread of y_i under random relative changes of the inputs by eps)^2

    error = max(rms(x - y) / rms(unit), max_i |x_i - y_i| / (unit_i + rms(unit)) / sqrt(2 ln n))

with y in float64 and x the recorded result. It needs no table of operations and no other record.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from numerics.compare.table.measure import epsilon, load
from numerics.compare.table.step_record import Call, Value
from numerics.describe import tensors_in

MODULES: dict[str, Any] = {
    "Functional": torch.nn.functional,
    "Tensor": torch.Tensor,
    "Torch": torch,
}
RANDOM = (
    "dropout",
    "rand",
    "bernoulli",
    "multinomial",
    "normal",
    "uniform",
    "exponential",
    "rrelu",
    "gumbel",
    "poisson",
)
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
ABSENT = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")  # None where not recorded
SAMPLES = 3
LARGEST = 1 << 24  # elements; larger calls are not replayed


class DefaultEps(TorchFunctionMode):
    """Give rms_norm the eps that it would choose for another dtype; its default is the eps of its dtype."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "").partition(".")[0] in ("rms_norm", "_fused_rms_norm"):
            if len(args) > 3:
                args = (*args[:3], self.eps if args[3] is None else args[3])
            elif kwargs.get("eps") is None:
                kwargs["eps"] = self.eps
        return func(*args, **kwargs)


class NotReplayableError(Exception):
    """The reason why a call cannot be replayed."""


def replayed_error(
    call: Call,
    inputs: Mapping[str, Value],
    outputs: Mapping[str, Value],
    parameters: Mapping[str, Value] | None = None,
) -> float:
    """Return the error of recorded results in units of rounding.

    call: the function and its plain arguments, or the layer and its settings. inputs, outputs, parameters: the
    recorded tensors of one side, by place. NotReplayableError says why there is none.
    """
    if call.backward:
        raise NotReplayableError("backward is judged side by side")
    function, name = layer_of(call) if call.is_module else function_of(call)
    if any(word in name for word in RANDOM) and any(value.plain is True for value in call.inputs.values()):
        raise NotReplayableError("random")
    weights = {place: value for place, value in (parameters or {}).items() if value.dtype}
    used = [*weights.values(), *(value for value in inputs.values() if value.dtype)]
    results = [value for value in outputs.values() if value.floating]
    if not used or not results or any(not value.has_values for value in (*used, *results)):
        raise NotReplayableError("no recorded values")
    if sum(value.count for value in (*used, *results)) > LARGEST:
        raise NotReplayableError("large")
    size = max(epsilon(value.dtype) for value in results)
    loaded = {place: load(value) for place, value in inputs.items() if value.dtype}
    state = {place: load(value) for place, value in weights.items()}
    generator = torch.Generator().manual_seed(0)

    computed = [load(value).dtype for value in inputs.values() if value.floating] or [torch.float32]
    eps = torch.finfo(torch.promote_types(computed[0], torch.float32)).eps

    def run(relative: float) -> list[Tensor]:
        with_weights = partial(function, _changed(state, relative, generator)) if call.is_module else function
        with DefaultEps(eps):
            return _run(with_weights, call, _changed(loaded, relative, generator))

    exact = run(0.0)
    others = [run(size) for _ in range(SAMPLES)]
    recorded = [load(value) for value in outputs.values() if value.dtype]
    if len(recorded) != len(exact) or any(x.shape != y.shape for x, y in zip(recorded, exact, strict=True)):
        raise NotReplayableError("other results in float64")
    return max(
        _error(_wide(x), y, [sample[index] for sample in others], size)
        for index, (x, y) in enumerate(zip(recorded, exact, strict=True))
        if y.is_floating_point() or y.is_complex()
    )


def function_of(call: Call) -> tuple[Any, str]:
    """Return a recorded function and its name."""
    group, _, name = call.path.partition(".")
    function = getattr(MODULES.get(group), name, None)
    if not callable(function) or "." in name:
        raise NotReplayableError("no function of torch")
    return function, name


def layer_of(call: Call) -> tuple[Any, str]:
    """Return what computes a layer of torch.nn from its parameters and inputs, and its name."""
    package, _, name = str(call.settings.get("class")).rpartition(".")
    kind: Any = getattr(sys.modules.get(package), name, None)
    if package not in [f"torch.nn.modules.{file}" for file in LAYERS] or name in (
        "MultiheadAttention",
        "RReLU",
    ):
        raise NotReplayableError("no single layer of torch.nn")

    def compute(state: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        layer: nn.Module = kind.__new__(kind)
        nn.Module.__init__(layer)
        for place, value in call.settings.items():
            if place != "class":
                setattr(layer, place, tuple(value) if isinstance(value, list) else value)
        for place in (*state, *ABSENT):
            if not hasattr(layer, place):
                layer.register_buffer(place, state.get(place))
        return layer(*args, **kwargs)

    return compute, name.lower()


def _wide(tensor: Tensor) -> Tensor:
    """Return a number in 64 bits, or in two of them; others as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _changed(loaded: Mapping[str, Tensor], relative: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Return tensors in float64. relative: the size of random changes."""
    changed = {}
    for place, tensor in loaded.items():
        wide = _wide(tensor).clone()
        if relative and (tensor.is_floating_point() or tensor.is_complex()):
            draws = torch.empty(tensor.shape, dtype=torch.float64).uniform_(-1, 1, generator=generator)
            wide = wide * (1 + relative * draws)
        changed[place] = wide
    return changed


def _run(function: Any, call: Call, changed: Mapping[str, Tensor]) -> list[Tensor]:
    """Call the function on tensors in float64."""
    args = [
        argument(part, str(index), changed) for index, part in enumerate(call.raw.get("input_args") or [])
    ]
    kwargs = {
        name: argument(part, name, changed) for name, part in (call.raw.get("input_kwargs") or {}).items()
    }
    try:
        with torch.no_grad():
            output = function(*args, **kwargs)
    except Exception as error:  # torch raises many kinds for arguments of another dtype
        raise NotReplayableError(f"{type(error).__name__} in float64") from error
    return [_wide(tensor) for tensor in tensors_in(output)]


def argument(
    tree: Any, place: str, tensors: Mapping[str, Tensor], floating: torch.dtype | None = torch.float64
) -> Any:
    """Return a recorded argument. tensors: by place. floating: in place of a floating dtype, where it is not None."""
    if tree is None:
        return None
    if isinstance(tree, list):
        return tuple(argument(part, f"{place}.{index}", tensors, floating) for index, part in enumerate(tree))
    if not isinstance(tree, dict):
        return tree
    kind = tree.get("type")
    if not isinstance(kind, str):
        return {key: argument(part, f"{place}.{key}", tensors, floating) for key, part in tree.items()}
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
        found = getattr(torch, str(value).removeprefix("torch."))
        if floating is None:
            return found
        return torch.complex128 if found.is_complex else floating if found.is_floating_point else found
    raise NotReplayableError(f"argument of type {kind}")


def _error(x: Tensor, y: Tensor, samples: list[Tensor], size: float) -> float:
    usable = y.isfinite()
    if not torch.equal(usable, x.isfinite()):
        return math.inf
    spread = torch.stack([(sample - y).abs().square() for sample in samples]).mean(0)
    unit = ((size * y.abs()).square() + spread).sqrt()[usable]
    error = (x - y).abs()[usable]
    if not error.numel() or not bool(error.any()):
        return 0.0
    rms_error, rms_unit = float(error.square().mean().sqrt()), float(unit.square().mean().sqrt())
    if not rms_unit:
        return math.inf
    highest = float((error / (unit + rms_unit)).max()) / math.sqrt(2 * math.log(max(error.numel(), 2)))
    return max(rms_error / rms_unit, highest)
