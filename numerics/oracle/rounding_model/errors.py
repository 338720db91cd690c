"""Apply the table of operations to a float64 reference: how far rounding may move its results.

The reference is computed again with random errors of the sizes in the table (Monte Carlo arithmetic: Parker, "Monte
Carlo Arithmetic", 1997). sigma is the standard deviation of a result over such runs. A sum of independent errors of at
most these sizes exceeds lambda sigma with a probability of at most 2 exp(-lambda^2 / 2), Hoeffding's inequality.
The errors are normal with the size as their deviation. So the change of a result is normal as well, to first order,
whatever the number of errors in it, and the uncertainty of sigma is known: see `measure`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from numerics.describe import tensors_in
from numerics.oracle.rounding_model.bounds import BoundRule, rule_of

MATMUL = {"highest": 0.0, "high": 2.0**-11, "medium": 2.0**-8}  # torch.set_float32_matmul_precision
FLOAT32 = 2.0**-24
NARROW = {torch.float32, torch.bfloat16, torch.float16}


@dataclass
class AtenTrace:
    """The operations of torch.ops.aten that a reference runs, in order, with the length of their longest sums."""

    calls: list[tuple[str, int]] = field(default_factory=list)
    casts: set[torch.dtype] = field(default_factory=set)  # that round the reference itself

    @property
    def rules(self) -> dict[str, BoundRule]:
        """Return the rows that allow an error, by name."""
        return {name: rule_of(name) for name, _ in self.calls if not rule_of(name).exact}

    @property
    def longest(self) -> int:
        """Return the length of the longest sum."""
        return max((terms for _, terms in self.calls), default=1)

    def describe(self) -> str:
        """Return the rows in a few words: "mm: matrix product, n = 768"."""
        longest = {name: max(n for other, n in self.calls if other == name) for name in self.rules}
        rows = [
            f"{name}: {rule_of(name).kind}" + (f", n = {n:,}" if n > 1 else "") for name, n in longest.items()
        ]
        casts = sorted(str(dtype).removeprefix("torch.") for dtype in self.casts)
        return "; ".join(rows + [f"the reference has the cast to {name} too" for name in casts])


class Tracing(TorchDispatchMode):
    """Note the operations that run, and change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = AtenTrace()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = operator_name(func)
        rule = rule_of(name, args)
        if name == "_to_copy":
            self.trace.casts |= {part.dtype for part in tensors_of(result)} & NARROW
        self.trace.calls.append((name, 1 if rule.exact else rule.terms(args, tensors_of(result))))
        return result


class RoundingErrors(TorchDispatchMode):
    """Change what each operation receives and returns by random errors of the sizes of its row.

    trace: of the same reference. dtype: the coarsest of the kernel that is judged. cast: whether the kernel rounds its
    inputs to this dtype, as autocast does.
    """

    def __init__(self, trace: AtenTrace, dtype: torch.dtype, seed: int = 0, cast: bool = False) -> None:
        super().__init__()
        self.calls: Iterator[tuple[str, int]] = iter(trace.calls)
        self.dtype = dtype
        self.stored = torch.finfo(dtype).eps / 2
        self.computed = min(self.stored, FLOAT32)
        self.matmul = MATMUL[torch.get_float32_matmul_precision()] if dtype == torch.float32 else 0.0
        self.generator = torch.Generator().manual_seed(seed)
        self.cast = cast
        self.rounded: dict[int, Any] = {}  # memory with results of rounded operations, by address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name, terms = next(self.calls)
        assert name == operator_name(func), (name, operator_name(func))
        rule = rule_of(name, args)
        if rule.exact:
            from_rounded = any(map(self._is_rounded, tensors_in([list(args), kwargs])))
            result = func(*args, **kwargs)
            if from_rounded and isinstance(result, float):  # a number that Python reads was stored before
                return result * (1 + self.stored * float(self._draws(torch.zeros(()))))
            if from_rounded:
                self._keep(result)
            return result
        size = (self.stored if rule.in_dtype else self.computed) * rule.inputs(terms)
        size += self.stored * rule.stored + self.matmul * rule.products
        changed = [self._changed(part, size, rule.normwise) for part in args]
        if func._schema.is_mutable and changed[0] is not args[0] and 0 not in args[0].stride():
            changed[0] = args[0].copy_(changed[0])  # overwritten by the result
        noise = self.computed * rule.absolute(args, terms) if rule.absolute else None
        result = func(*changed, **{key: self._changed(part, size) for key, part in kwargs.items()})
        for part in tensors_of(result):
            self._add_noise(part, self.computed * rule.outputs(terms), noise)
        self._keep(result)
        return result

    def _changed(self, value: Any, size: float, normwise: bool = False) -> Any:
        """Return an argument with relative errors; the result of another operation has its rounding as well."""
        if isinstance(value, Tensor):
            relative = math.hypot(size, self.stored * self._is_rounded(value))
            if not relative or not is_wide(value) or not value.numel():
                return value
            if normwise and value.dim() > 1:
                finite = torch.where(value.isfinite(), value, 0.0)
                scale = finite.abs().square().mean((-2, -1), keepdim=True).sqrt()
                return value + relative * scale * self._draws(value)
            return value * (1 + relative * self._draws(value))
        if isinstance(value, list | tuple) and any(isinstance(part, Tensor) for part in value):
            return [self._changed(part, size) for part in value]
        if isinstance(value, float) and math.isfinite(value) and (error := self._misfit(value)):
            return value * (1 + max(self.stored, error) * float(self._draws(torch.zeros(()))))
        return value

    def _add_noise(self, part: Tensor, relative: float, absolute: Tensor | None) -> None:
        if is_wide(part) and relative:
            part.mul_(1 + relative * self._draws(part))
        if is_wide(part) and absolute is not None and absolute.dim() in (0, part.dim()):
            part.add_(absolute * self._draws(part))

    def _draws(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, dtype=torch.float64)

    def _misfit(self, value: float) -> float:
        """Return the relative error of a number in the dtype: above roundoff for a subnormal number."""
        error = float(torch.tensor(value, dtype=torch.float64).to(self.dtype)) - value
        return min(abs(error / value), 1.0) if error else 0.0

    def _keep(self, result: Any) -> None:
        for tensor in tensors_of(result):
            if is_wide(tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                self.rounded[storage.data_ptr()] = storage

    def _is_rounded(self, tensor: Tensor) -> bool:
        known = is_wide(tensor) and bool(tensor.numel())
        return known and (self.cast or tensor.untyped_storage().data_ptr() in self.rounded)


def operator_name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def tensors_of(result: Any) -> list[Tensor]:
    parts = list(result) if isinstance(result, list | tuple) else [result]
    return [part for part in parts if isinstance(part, Tensor)]


def is_wide(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float64, torch.complex128)
