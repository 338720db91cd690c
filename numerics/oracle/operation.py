"""One operation and its arguments, run on a device, and in float64 on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from numerics.describe import tensors_in
from numerics.oracle.rounding_model.errors import RoundingErrors, Tracing

Change = Callable[[Tensor], Any]
RECORDED, GENERATED, GIVEN = "recorded", "generated", "given"
SAMPLES = 4  # runs with random roundings


@dataclass(frozen=True)
class Operation:
    """A call. args, kwargs: tensors on the CPU in the dtype of the call, and plain values.

    label: the function, as in "Functional.gelu". reference: computes the same from tensors in float64; the function
    itself where it is None. received: the gradients of the results, None without a backward. wanted: which floating
    tensors of args and kwargs need a gradient, by their order; all where it is None. values: their origin.
    results, passed: recorded results, and recorded gradients of the inputs. on_device: whether it is run on the device.
    """

    name: str
    label: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reference: Callable[..., Any] | None = None
    received: Sequence[Tensor | None] | None = None
    wanted: Sequence[bool] | None = None
    values: str = GIVEN
    results: Sequence[Tensor] = ()
    passed: Sequence[Tensor | None] = ()
    autocast: torch.dtype | None = None
    on_device: bool = True

    @property
    def floating(self) -> list[Tensor]:
        """Return the floating tensors of the arguments, in order."""
        return [tensor for tensor in tensors_in([list(self.args), dict(self.kwargs)]) if _floats(tensor)]

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the coarsest dtype of the call's floating tensors."""
        tensors = [*self.floating, *(tensor for tensor in self.results if _floats(tensor))]
        found = {tensor.dtype for tensor in tensors} | ({self.autocast} if self.autocast else set())
        return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=None)

    @property
    def in_place(self) -> bool:
        """Return whether the function overwrites an argument."""
        name = self.label.rpartition(".")[2]
        return (name[-1:] == "_" != name[-2:-1]) or name.startswith("__i") or "out" in self.kwargs


@dataclass(frozen=True)
class Computed:
    """Results, and gradients of the floating arguments by their order; None where there is none."""

    results: list[Tensor]
    gradients: list[Tensor | None]


def converted(value: Any, change: Change, dtype: torch.dtype | None = None) -> Any:
    """Return nested arguments with changed tensors. dtype: in place of floating dtypes among the plain values."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, torch.dtype) and dtype and value.is_floating_point:
        return dtype
    if (
        isinstance(value, list | tuple)
        and not hasattr(value, "_fields")
        and not isinstance(value, torch.Size)
    ):
        return type(value)([converted(part, change, dtype) for part in value])
    if isinstance(value, dict):
        return {key: converted(part, change, dtype) for key, part in value.items()}
    return value


def compute(
    operation: Operation,
    function: Callable[..., Any],
    convert: Change,
    dtype: torch.dtype | None = None,
    around: AbstractContextManager[Any] | None = None,
) -> Computed:
    """Run forward and backward. convert: of each tensor. dtype: in place of floating dtypes among the arguments."""
    leaves: list[Tensor] = []
    backward = operation.received is not None

    def prepare(tensor: Tensor) -> Tensor:
        changed: Tensor = convert(tensor.detach())
        if not _floats(tensor):
            return changed
        place = len(leaves)
        needed = backward and (operation.wanted is None or operation.wanted[place : place + 1] != [False])
        leaf = changed.clone() if changed is tensor or changed.data_ptr() == tensor.data_ptr() else changed
        leaves.append(leaf.requires_grad_(needed))
        return leaf.clone() if operation.in_place else leaf

    args = converted(list(operation.args), prepare, dtype)
    kwargs = converted(dict(operation.kwargs), prepare, dtype)
    with around or contextlib.nullcontext(), torch.enable_grad():
        results = tensors_in(_listed(function(*args, **kwargs)))
        gradients: list[Tensor | None] = [None] * len(leaves)
        received = list(operation.received or ())
        pairs = [
            (result, convert(gradient).to(result.dtype))
            for result, gradient in zip(results, received, strict=False)
            if gradient is not None and result.requires_grad
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if pairs and wanted:
            found = iter(
                torch.autograd.grad(
                    [result for result, _ in pairs],
                    wanted,
                    [gradient for _, gradient in pairs],
                    allow_unused=True,
                )
            )
            gradients = [next(found) if leaf.requires_grad else None for leaf in leaves]
    return Computed([result.detach() for result in results], gradients)


@dataclass(frozen=True)
class Reference:
    """The results in float64, how far rounding moves them, and which rows of the table say so."""

    exact: Computed
    samples: list[Computed]
    rules: dict[str, Any]
    derivation: str
    longest: int = 1  # sum, in terms


def reference(operation: Operation, samples: int = SAMPLES) -> Reference:
    """Compute an operation in float64 on the CPU. Attention is computed by its definition, not by a fused kernel."""
    function = operation.reference or operation.function
    coarse = operation.dtype
    assert coarse is not None

    if (
        function is torch.nn.functional.rms_norm
        and len(operation.args) < 4
        and not operation.kwargs.get("eps")
    ):
        dtype = torch.promote_types(operation.floating[0].dtype, torch.float32)
        eps = torch.finfo(dtype).eps  # its default depends on the dtype
        operation = dataclasses.replace(operation, kwargs={**operation.kwargs, "eps": eps})

    def run(mode: AbstractContextManager[Any]) -> Computed:
        with sdpa_kernel(SDPBackend.MATH):
            return compute(operation, function, widened, torch.float64, mode)

    tracing = Tracing()
    exact = run(tracing)
    trace = tracing.trace
    others = [
        run(RoundingErrors(trace, coarse, seed, operation.autocast is not None)) for seed in range(samples)
    ]
    return Reference(exact, others, trace.rules, trace.describe(), trace.longest)


def widened(tensor: Tensor) -> Tensor:
    """Return floating tensors in float64, others as they are, on the CPU."""
    if tensor.is_complex():
        return tensor.to("cpu", torch.complex128)
    return tensor.to("cpu", torch.float64) if tensor.is_floating_point() else tensor.cpu()


def _floats(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _listed(result: Any) -> Any:
    return list(result) if isinstance(result, tuple) else result
