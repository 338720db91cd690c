"""Compute a module in a wider format, on the CPU, or by small operations.

Arguments, parameters and buffers are converted before forward, and results after it. The conversions are part of the
graph, so backward computes in the same format and on the same device. Parameters keep their format and device.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from referee.errors import NumericsError
from referee.numerics.describe import WITHOUT_FLOAT64

# Small operations in place of fused ones: attention, GELU, LayerNorm and cross-entropy.
#
# Each function has the signature of torch.nn.functional's. Inputs of half precision are computed in float32; the result
# has the dtype of the input.


HALF = (torch.bfloat16, torch.float16)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled dot-product attention by two products and a softmax; memory of T x T.

    query (..., T, D), key and value (..., S, D). A row whose keys are all masked is 0, as torch's is.
    """
    dtype = query.dtype
    query, key, value = _wide(query), _wide(key), _wide(value)
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + _wide(attn_mask)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)  # its gradient is 0, not NaN
    exponentials = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    weights = (exponentials / exponentials.sum(-1, keepdim=True)).masked_fill(empty, 0.0)
    if dropout_p:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    return (weights @ value).to(dtype)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Compute x Phi(x), or its tanh approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    x = _wide(input)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return (0.5 * x * (1 + torch.tanh(inner))).to(input.dtype)
    return (0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))).to(input.dtype)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Compute (x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions (Ba et al. 2016)."""
    x = _wide(input)
    dimensions = tuple(range(-len(normalized_shape), 0))
    centered = x - x.mean(dimensions, keepdim=True)
    y = centered / (centered.square().mean(dimensions, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * _wide(weight)
    return (y if bias is None else y + _wide(bias)).to(input.dtype)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the cross-entropy of classes in nats. input (N, C, ...) or (C,). NumericsError for its other forms."""
    others = (weight, size_average, reduce, label_smoothing or None)
    if any(one is not None for one in others) or target.is_floating_point():
        raise NumericsError(
            "cross_entropy by small operations has no weights, probabilities or label smoothing; fix: upcast it instead"
        )
    x = _wide(input)
    classes = 0 if x.dim() == 1 else 1
    x = x.movedim(classes, -1)
    shifted = x - x.amax(-1, keepdim=True).detach()
    log_probs = shifted - shifted.exp().sum(-1, keepdim=True).log()
    scored = target != ignore_index
    losses = -log_probs.gather(-1, target.masked_fill(~scored, 0)[..., None])[..., 0].masked_fill(
        ~scored, 0.0
    )
    if reduction == "none":
        return losses.to(input.dtype)
    return (losses.sum() / scored.sum() if reduction == "mean" else losses.sum()).to(input.dtype)


# name of a function of torch -> its replacement
SMALL_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": attention,
    "gelu": gelu,
    "layer_norm": layer_norm,
    "cross_entropy": cross_entropy,
}
NAMES = {"attention": "scaled_dot_product_attention"}  # other names that a pattern may use


CPU, UPCAST, SMALL = "cpu", "upcast", "small"
KINDS = {CPU: "on the CPU", UPCAST: "in a wider format", SMALL: "by small operations"}
CASTS = {
    "bfloat16": torch.bfloat16,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
}
# backward would recompute without the fix, so activations within a fixed module are kept
KEEPING: dict[str, Any] = {
    "_checkpoint_without_reentrant_generator": lambda *args, **options: iter([None]),
    "CheckpointFunction": SimpleNamespace(apply=lambda function, preserve, *args: function(*args)),
}
_running: ContextVar[frozenset[str]] = ContextVar("kinds of fixed modules that run", default=frozenset())
Around = Callable[[], AbstractContextManager[Any]]


@dataclass
class FixedModule:
    """One replaced computation: a module, or the calls of a function within it."""

    word: str  # that names it
    kind: str
    path: str  # of the module
    module: str  # its class
    function: str = ""  # "": the whole module
    around: Around = contextlib.nullcontext  # a further context of the computation
    used: bool = False  # whether a call was computed in another way

    def __str__(self) -> str:
        of = f"{self.function} in {self.path}" if self.function else self.path or self.module
        return f"{of} ({self.module}) {KINDS[self.kind]}"

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return forward(*args, **kwargs) of the module, fixed."""
        kinds = _running.get()
        if not self.function and self.kind in kinds:  # within a module with the same fix
            self.used |= self.kind == UPCAST
            return forward(*args, **kwargs)
        token = _running.set(kinds if self.function else kinds | {self.kind})
        try:
            with self.around(), mock.patch.multiple(torch.utils.checkpoint, **KEEPING):
                if not self.function and self.kind != SMALL:
                    return self._converted(forward, args, kwargs, module)
                with ReplacedFunctions(self._replacements()):
                    return forward(*args, **kwargs)
        finally:
            _running.reset(token)

    def _replacements(self) -> dict[str, Callable[..., Any]]:
        """Return name of a function -> its replacement, which takes the function, args and kwargs."""
        if self.kind != SMALL:
            return {self.function: self._converted}
        names = [self.function] if self.function else [*SMALL_OPERATIONS]
        return {name: functools.partial(self._small, SMALL_OPERATIONS[name]) for name in names}

    def _small(self, small: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.used = True
        return small(*args, **kwargs)

    def _converted(
        self, function: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module | None = None
    ) -> Any:
        """Call a function with converted tensors, and convert its results back. module: its state is converted, too."""
        state = [*module.parameters(), *module.buffers()] if module else []
        conversion = Conversion.of(self.kind, (args, kwargs), state)
        self.used |= self.kind != CPU or conversion.home is not None
        given = tensors_of((args, kwargs))
        new_args, new_kwargs = mapped((args, kwargs), conversion.into)
        inputs = tensors_of((new_args, new_kwargs))
        versions = [_version(tensor) for tensor in inputs]
        with swapped_state(module, conversion.into), conversion.context():
            result = function(*new_args, **new_kwargs)
        for before, tensor, version in zip(given, inputs, versions, strict=True):
            if tensor is not before and _version(tensor) != version:
                raise NumericsError(
                    f"{self.path} overwrites one of its arguments, which a fix would lose; fix: name a module around it"
                )
        return mapped(result, conversion.back)


@dataclass(frozen=True)
class Conversion:
    """Formats and devices of one computation."""

    wide: torch.dtype | None = None  # of an up-cast computation; None: formats stay
    format: torch.dtype | None = None  # of results of one dimension or more; None: they stay
    home: torch.device | None = None  # of the results, where the computation is moved to the CPU
    autocast: torch.dtype | None = None  # on the CPU

    @classmethod
    def of(cls, kind: str, arguments: Any, state: Sequence[Tensor] = ()) -> Conversion:
        """Return the conversion of a computation. state: parameters and buffers of a module.

        An up-cast computation has float32 where half precision or autocast is found, else float64, on the CPU where the
        device has none. Results return to the widest format among the arguments, or without any to that of the state.
        Under autocast they stay wide, since the functions that follow accept any format.
        """
        tensors = [*tensors_of(arguments), *state]
        devices = {one.device.type for one in tensors} - {"meta"}
        autocasts = [
            torch.get_autocast_dtype(name) for name in sorted(devices) if torch.is_autocast_enabled(name)
        ]
        if kind == CPU:
            home = next((one.device for one in tensors if one.device.type != "cpu"), None)
            return cls(home=home, autocast=autocasts[0] if autocasts and home else None)
        half = bool(autocasts) or any(one.dtype in HALF for one in tensors)
        lacking = (one.device for one in tensors if one.device.type in WITHOUT_FLOAT64)
        given = [one for one in tree_leaves(arguments) if isinstance(one, torch.dtype)]
        given += [one.dtype for one in tensors_of(arguments)]
        formats = [*filter(None, map(_real, given))] or [*filter(None, (_real(one.dtype) for one in state))]
        return cls(
            torch.float32 if half else torch.float64,
            None if autocasts else max(formats, key=lambda dtype: dtype.itemsize, default=None),
            None if half else next(lacking, None),
        )

    def into(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # observers see the calls of the model alone
            tensor = tensor.cpu() if self.home else tensor
            return _as(tensor, self.wide) if narrower(_real(tensor.dtype), self.wide) else tensor

    def back(self, tensor: Tensor) -> Tensor:
        """Convert a result. A scalar of half-precision inputs, such as a loss, stays wide: any tensor takes it."""
        scalar = tensor.dim() == 0 and self.wide == torch.float32
        with torch._C.DisableTorchFunction():
            if not scalar and narrower(self.format, _real(tensor.dtype)):
                tensor = _as(tensor, self.format)
            return tensor.to(self.home) if self.home else tensor

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Enter the context of the computation. It disables autocast and narrower casts where the format is wide."""
        default = torch.get_default_dtype()
        with contextlib.ExitStack() as stack:
            if self.wide:
                if narrower(default, self.wide):
                    torch.set_default_dtype(self.wide)
                    stack.callback(torch.set_default_dtype, default)
                stack.enter_context(WideCasts(self.wide))
            if self.autocast:
                stack.enter_context(torch.autocast("cpu", dtype=self.autocast))
            yield


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors that `mapped` changes, in its order."""
    found: list[Tensor] = []
    mapped(value, lambda one: found.append(one) or one)  # type: ignore[func-returns-value]
    return found


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with other tensors: of tuples, lists, dicts and dataclasses. Other objects are kept."""

    def leaf(one: Any) -> Any:
        if isinstance(one, Tensor):
            return change(one)
        if not dataclasses.is_dataclass(one) or isinstance(one, type):
            return one
        other = copy.copy(one)
        for part in dataclasses.fields(one):
            object.__setattr__(other, part.name, mapped(getattr(one, part.name), change))
        return other

    return tree_map(leaf, value)


@contextlib.contextmanager
def swapped_state(module: nn.Module | None, into: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the block, parameters and buffers are converted. Buffers that it changes or sets are converted back."""
    registries: list[tuple[dict[str, Any], bool]] = []
    for part in module.modules() if module else ():
        registries += [(part._parameters, False), (part._buffers, True)]
    places = [
        (registry, name, tensor, is_buffer)
        for registry, is_buffer in registries
        for name, tensor in registry.items()
        if tensor is not None
    ]
    others = {id(tensor): into(tensor) for _, _, tensor, _ in places}
    for registry, name, tensor, _ in places:
        registry[name] = others[id(tensor)]
    try:
        yield
    finally:
        for registry, name, tensor, is_buffer in places:
            now, given = registry.get(name), others[id(tensor)]
            registry[name] = tensor
            if is_buffer and now is not None and now is not given:
                registry[name] = now.to(tensor.device, tensor.dtype)
            elif is_buffer and now is not None and given is not tensor:
                with torch.no_grad():
                    tensor.copy_(given)


class WideCasts(TorchFunctionMode):
    """Casts to a narrower type, and autocast within the block, have no effect."""

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self.wide = wide

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(self.wide if narrower(one, self.wide) else one for one in args)
        options = {
            name: self.wide if narrower(one, self.wide) else one for name, one in (kwargs or {}).items()
        }
        name = getattr(func, "__name__", "")
        if narrower(CASTS.get(name), self.wide) and args and isinstance(args[0], Tensor):
            func, args = Tensor.to, (args[0], self.wide, *args[1:])
        devices = {one.device.type for one in args if isinstance(one, Tensor)} | {"cpu"}
        with contextlib.ExitStack() as stack:
            for device in devices - {"meta"}:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return func(*args, **options)


class ReplacedFunctions(TorchFunctionMode):
    """Calls of the named functions are replaced; those within another function of torch are not."""

    def __init__(self, replacements: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.replacements = replacements

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(getattr(func, "__name__", ""))
        name = name[2:-2] if name.startswith("__") and name.endswith("__") else name  # x @ y is matmul
        if name in self.replacements and "out" not in (kwargs or {}):
            return self.replacements[name](func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def narrower(dtype: Any, wide: torch.dtype | None) -> bool:
    """Whether dtype is a floating-point type of fewer bytes than `wide`."""
    if wide is None or not isinstance(dtype, torch.dtype):
        return False
    return dtype.is_floating_point and dtype.itemsize < wide.itemsize


def _real(dtype: torch.dtype) -> torch.dtype | None:
    """Return a floating-point format, or that of the parts of complex numbers; None for others."""
    return dtype.to_real() if dtype.is_floating_point or dtype.is_complex else None


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    assert dtype
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was overwritten; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version
