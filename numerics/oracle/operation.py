"""One operation and its arguments, run on a device, and in float64 on the CPU."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from numerics.describe import tensors_in
from numerics.errors import NumericsError, described
from numerics.oracle.rounding_model.errors import RoundingErrors, Tracing
from numerics.oracle.rounding_model.jumps import jumping, slack
from numerics.oracle.rounding_model.measure import STAGES, Measure, measure, squared_change
from numerics.rounding.within_rounding import DefaultEps

Change = Callable[[Tensor], Any]
RECORDED, GENERATED, GIVEN = "recorded", "generated", "given"


@dataclass(frozen=True)
class Operation:
    """A call. args, kwargs: tensors on the CPU in the dtype of the call, and plain values.

    label: the function, as in "Functional.gelu". reference: computes the same from tensors in float64; the function
    itself where it is None. received: the gradients of the results, None without a backward. wanted: which floating
    tensors of args and kwargs need a gradient, by their order; all where it is None. values: their origin.
    results, passed: recorded results, and recorded gradients of the inputs. on_device: whether it is run on the device.
    dtypes: of the results that the reference returns for these arguments, empty where unknown.
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
    dtypes: Sequence[torch.dtype] = ()

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
        leaf = changed.clone() if changed.data_ptr() == tensor.data_ptr() else changed
        if not _floats(tensor):
            return leaf
        place = len(leaves)
        needed = backward and (operation.wanted is None or operation.wanted[place : place + 1] != [False])
        leaves.append(leaf.requires_grad_(needed))
        return leaf.clone() if needed else leaf  # a leaf that needs a gradient cannot be overwritten

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


@dataclass
class Reference:
    """The results in float64, how far rounding moves them, and which rows of the table say so.

    draw: runs with random roundings from a seed. longest: sum, in terms. runs: of `draw` so far.
    """

    exact: Computed
    draw: Callable[[int], Computed]
    rules: dict[str, Any]
    derivation: str
    longest: int = 1
    runs: int = 0
    beyond: Callable[[], list[Computed] | None] = list  # runs beyond the jumps of step functions
    _beyond: list[Computed] | None = None
    _tried: bool = False
    _squares: tuple[list[Tensor | float], list[Tensor | float]] = field(default_factory=lambda: ([], []))

    def sigma(self, direction: str, place: int) -> Tensor:
        """Return the root mean square change of a result ("forward") or a gradient over the runs; flat if complex."""
        exact = self._sides(self.exact)[direction == "backward"][place]
        assert exact is not None
        squares = self._squares[direction == "backward"]
        total = squares[place] if place < len(squares) else 0.0
        if isinstance(total, Tensor):
            return (total / self.runs).sqrt()
        return squared_change(exact, exact)

    def jumps(self, direction: str, place: int) -> Tensor | None:
        """Return how far a jump of a step function may move each element; None where there is no jump."""
        if not self._tried:
            self._beyond, self._tried = self.beyond(), True
        exact = self._sides(self.exact)[direction == "backward"][place]
        samples = [self._sides(run)[direction == "backward"][place] for run in self._beyond or []]
        found = [sample for sample in samples if sample is not None]
        if exact is None or not found or any(sample.shape != exact.shape for sample in found):
            return None
        if exact.is_complex():
            exact, found = torch.view_as_real(exact), [torch.view_as_real(sample) for sample in found]
        if exact.is_floating_point():
            moved = slack(exact, found)
        else:
            moved = torch.stack([sample != exact for sample in found]).any(0).double()
        return moved if bool(moved.any()) else None

    def unstable(self, place: int) -> Tensor:
        """Return which elements of a result of integers or truth values a rounding error may change."""
        exact = self.exact.results[place]
        found = torch.zeros(exact.shape, dtype=torch.bool)
        jumps = self.jumps("forward", place)
        if self._beyond is None:
            return ~found
        try:
            for seed in range(STAGES[1]) if self.rules else ():
                found |= self.draw(seed).results[place] != exact
        except Exception:  # another shape, or a rounding that the operation refuses
            return torch.ones_like(found)
        return found if jumps is None else found | (jumps != 0)

    def extend(self, runs: int) -> None:
        """Run with random roundings until there are so many runs. Without a row that allows an error, none is run."""
        while self.runs < runs:
            if self.rules:
                self._add(self.draw(self.runs))
            self.runs += 1

    def _add(self, sample: Computed) -> None:
        for squares, exact, changed in zip(
            self._squares, self._sides(self.exact), self._sides(sample), strict=True
        ):
            squares += [0.0] * (len(exact) - len(squares))
            for place, (one, other) in enumerate(zip(exact, changed, strict=False)):
                if one is not None and other is not None and (one.is_floating_point() or one.is_complex()):
                    squares[place] = squares[place] + squared_change(one, other)

    @staticmethod
    def _sides(computed: Computed) -> tuple[list[Tensor | None], list[Tensor | None]]:
        return [*computed.results], computed.gradients


def reference(operation: Operation) -> Reference:
    """Compute an operation in float64 on the CPU. Attention is computed by its definition, not by a fused kernel."""
    function = operation.reference or operation.function
    coarse = operation.dtype
    assert coarse is not None

    eps = torch.finfo(torch.promote_types(coarse, torch.float32)).eps

    def run(mode: AbstractContextManager[Any]) -> Computed:
        with sdpa_kernel(SDPBackend.MATH), DefaultEps(eps):
            return compute(operation, function, widened, torch.float64, mode)

    tracing = Tracing()
    exact = run(tracing)
    trace = tracing.trace

    def draw(seed: int) -> Computed:
        return run(RoundingErrors(trace, coarse, seed, operation.autocast is not None))

    def beyond() -> list[Computed] | None:
        return jumping(run, trace, coarse, operation.autocast is not None)

    return Reference(exact, draw, trace.rules, trace.describe(), trace.longest, beyond=beyond)


def judged(
    result: Tensor,
    known: Reference,
    direction: str,
    place: int,
    dtype: torch.dtype,
    first: int,
    extra: float = 0.0,
) -> Measure:
    """Measure a result or a gradient, with as many runs with random roundings as the decision needs.

    dtype: that the kernel rounds to. first: runs of the first stage. extra: is added to sigma. The ratio is relative to
    the bound that accepts; relative to the one that proves where only that one accepts.
    """
    exact = known._sides(known.exact)[direction == "backward"][place]
    assert exact is not None
    proof: Measure | None = None
    for runs in (first, *STAGES[1:]):
        try:
            known.extend(runs)
        except Exception:  # a rounding that the operation refuses, as of an almost singular matrix
            if proof is None:
                raise
            return proof
        sigma = known.sigma(direction, place) + extra
        found = measure(result, exact, sigma, dtype)
        if not found.wrong:
            return found
        proof = measure(result, exact, sigma, dtype, runs)
        if proof.wrong:
            jumps = known.jumps(direction, place)
            return found if jumps is None else measure(result, exact, sigma, dtype, runs, jumps)
    assert proof is not None
    return proof


def with_parameters(operation: Operation) -> Operation:
    """Return an operation whose last argument is the state of its modules; itself where there is none.

    The modules are deep copies. NumericsError where one cannot be copied.
    """
    modules = [operation.function, operation.reference]
    if not any(isinstance(module, nn.Module) for module in modules):
        return operation
    states = [_state(module) for module in modules]
    wanted = [True for tensor in tensors_in(list(operation.args)) if _floats(tensor)]
    for place, state in enumerate(states):
        wanted += [place == 0 and tensor.requires_grad for tensor in state.values() if _floats(tensor)]
    function, reference = (_function(module, place, operation.name) for place, module in enumerate(modules))
    assert function is not None
    return dataclasses.replace(
        operation, function=function, reference=reference, args=(*operation.args, states), wanted=wanted
    )


def _state(module: Any) -> dict[str, Tensor]:
    if not isinstance(module, nn.Module):
        return {}
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _function(given: Any, place: int, name: str) -> Callable[..., Any] | None:
    """Return a function whose last argument has the states. place: of its own state among them."""
    if given is None:
        return None
    if not isinstance(given, nn.Module):
        return lambda *args, **options: given(*args[:-1], **options)
    try:
        module = copy.deepcopy(given)
    except Exception as error:
        raise NumericsError(
            f"{name} cannot be checked: no deep copy: {described(error)}; fix: pass a function"
        ) from error
    return lambda *args, **options: functional_call(module, args[-1][place], args[:-1], options)


def widened(tensor: Tensor) -> Tensor:
    """Return floating tensors in float64, others as they are, on the CPU."""
    if tensor.is_complex():
        return tensor.to("cpu", torch.complex128)
    return tensor.to("cpu", torch.float64) if tensor.is_floating_point() else tensor.cpu()


def _floats(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _listed(result: Any) -> Any:
    return list(result) if isinstance(result, tuple) else result
