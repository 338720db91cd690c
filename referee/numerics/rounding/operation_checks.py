"""Check operations on a device against float64 on the CPU: in their dtype, in float32, and on extreme inputs.

Extreme inputs are zeros, large and subnormal numbers, an infinity and a NaN in the first floating argument, forward
only. Large numbers are at most the fourth root of the largest one, so that products of three of them are finite. A
lost NaN is wrong, but for softmax and attention, whose masks are infinities. Other places of infinities and NaN, and
subnormal numbers that count as zero, are not judged: correct devices differ there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from referee.errors import NumericsError, described
from referee.numerics.describe import tensors_in
from referee.numerics.rounding.within_rounding import (
    RANDOM,
    CallOutput,
    Error,
    Float64Reference,
    FunctionCall,
    coarsest,
    converted,
    in_float64,
    is_number,
    single,
    without_draws,
)

Around = Callable[[], AbstractContextManager[Any]]
RECORDED, DEVICE, FLOAT32 = (
    "recorded",
    "device",
    "device, float32",
)  # runs; others are kinds of extreme inputs
WRONG, ROUNDING = "wrong", "rounding"
LARGEST = 1 << 22  # elements of an operation that is run on extreme inputs


@dataclass(frozen=True)
class Operation:
    """A call to check, with its tensors on the CPU in the dtype of the call."""

    name: str
    label: str  # the function, as in "Functional.gelu"
    call: FunctionCall
    reference: Callable[..., Any] | None = None  # computes the same in float64; None: the function itself
    results: Sequence[Tensor] = ()  # recorded
    passed: Sequence[Tensor | None] = ()  # recorded gradients of the floating inputs
    autocast: torch.dtype | None = None
    on_device: bool = True

    @property
    def should(self) -> FunctionCall:
        """Return the call of the reference."""
        return dataclasses.replace(self.call, function=self.reference or self.call.function)

    def in_float64(self, done: CallOutput) -> Float64Reference | None:
        """Return the reference for results; None where the call is random."""
        return in_float64(self.should, coarsest(self.call, done))


@dataclass(frozen=True)
class Check:
    """The error of a result or a gradient of one operation."""

    name: str
    label: str
    part: str  # "result 0", "gradient 1" of the floating inputs, or "arguments"
    dtype: str
    how: str  # DEVICE, FLOAT32, RECORDED, or the kind of extreme input
    units: float
    bound: float
    why: str = ""  # what no number says
    digest: str = ""  # of the inputs

    @property
    def verdict(self) -> str:
        return WRONG if self.wrong else ROUNDING

    @property
    def wrong(self) -> bool:
        return self.units > self.bound

    @property
    def direction(self) -> str:
        return "backward" if self.part.startswith("gradient") else "forward"

    @property
    def text(self) -> str:
        """Return the check in one line."""
        numbers = f"{self.units:.3g} units of rounding, at most {self.bound:.3g}"
        return f"{self.name} {self.direction}, {self.part}, {self.how}: {self.why or numbers}"


@dataclass(frozen=True)
class Skipped:
    """An operation that was not checked, or one of its runs."""

    name: str
    label: str
    reason: str


@dataclass
class Oracle:
    """Checks operations on a device. checks, skipped, names: of all operations so far."""

    device: torch.device
    around: Around = contextlib.nullcontext  # of each run on the device
    checks: list[Check] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    names: dict[str, None] = field(default_factory=dict)  # in order
    _tried: set[str] = field(default_factory=set)  # kinds of calls that were run on extreme inputs

    @property
    def not_checked(self) -> Counter[str]:
        """Return how many operations have no check, by the first reason."""
        checked = {check.name for check in self.checks}
        reasons = {skip.name: skip.reason for skip in reversed(self.skipped)}
        return Counter(reasons.get(name, "nothing to compare") for name in self.names if name not in checked)

    def check(self, operation: Operation | Skipped) -> list[Check]:
        """Check one operation. Returns its checks, and adds them to `checks`; `skipped` has reasons."""
        before = len(self.checks)
        self.names[operation.name] = None
        if isinstance(operation, Skipped):
            self.skipped.append(operation)
        elif not operation.call.tensors:
            self._skip(operation, "no floating tensor")
        elif operation.results and not self._judge(operation, RECORDED):
            return []
        elif operation.on_device and self._judge(operation, DEVICE):
            tensors = operation.call.tensors
            if {tensor.dtype for tensor in tensors} & {torch.bfloat16, torch.float16} or operation.autocast:
                self._judge(_in_float32(operation), FLOAT32)
            kind = _kind(operation)
            if kind not in self._tried:
                self._tried.add(kind)
                if sum(tensor.numel() for tensor in tensors) > LARGEST:
                    self._skip(operation, f"extremes: over {LARGEST:,} elements")
                else:
                    self._check_extremes(operation)
        return self.checks[before:]

    def run(self, operation: Operation) -> CallOutput:
        """Run an operation on the device, forward and backward."""
        with contextlib.ExitStack() as stack:
            if operation.autocast:
                stack.enter_context(torch.autocast(self.device.type, dtype=operation.autocast))
            stack.enter_context(self.around())
            return operation.call.run(lambda tensor: tensor.to(self.device))

    def _judge(self, operation: Operation, how: str) -> bool:
        """Add the checks of one run. Returns False where the operation cannot be checked."""
        try:
            if how == RECORDED:
                done: CallOutput | None = CallOutput(operation.results, operation.passed)
            else:
                done = without_draws(lambda: self.run(operation))
        except Exception as error:  # torch raises many kinds
            self._skip(operation, f"{how}: {described(error)}")
            return False
        try:
            known = operation.in_float64(done) if done else None
        except Exception as error:
            self._refused(operation, error)
            return False
        if done is None or known is None:
            self._skip(operation, RANDOM)
            return False
        digest = digest_of(operation.call)
        for found in [*known.errors(done), *(missing(done, known) if how != RECORDED else ())]:
            self._add(operation, how, found, digest)
        if how == DEVICE and not done.results:
            self._skip(operation, "it returns no tensor")
        return True

    def _refused(self, operation: Operation, error: Exception) -> None:
        """Report a call that float64 refuses: a finding where the CPU refuses a recorded one in its dtype, too."""
        reason = described(error)
        try:
            operation.should.run(lambda tensor: tensor)
        except Exception:
            why = f"the CPU refuses these arguments: {reason}"
            self._add(operation, DEVICE, Error("arguments", math.inf, 0.0, None, why))
            return
        self._skip(operation, f"no float64: {reason}")

    def _check_extremes(self, operation: Operation) -> None:
        x = operation.call.tensors[0]
        if not x.numel() or x.is_complex() or x.dtype == torch.float64 or not bool(x.isfinite().any()):
            return
        for kind, values in extreme_inputs(x):
            changed = _with_first(operation, values)
            try:
                done = self.run(changed)
                known = changed.in_float64(done)
                assert known is not None, RANDOM
                found = [
                    error if error.within else _tolerated(kind, changed, done.parts, known, error)
                    for error in known.errors(done)
                ]
            except Exception as error:  # an operation that refuses such values, as a Cholesky decomposition
                self._skip(operation, f"{kind}: {described(error)}")
                continue
            for each in found:
                self._add(operation, kind, each)

    def _add(self, operation: Operation, how: str, error: Error, digest: str = "") -> None:
        dtype = str(error.dtype or "").removeprefix("torch.")
        numbers = error.units, error.bound, error.why, digest
        place = operation.name, operation.label, error.part, dtype, how
        self.checks.append(Check(*place, *numbers))

    def _skip(self, operation: Operation, reason: str) -> None:
        self.skipped.append(Skipped(operation.name, operation.label, reason))


def check_operation(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    *,
    reference: Callable[..., Any] | None = None,
    device: str | torch.device | None = None,
) -> list[Check]:
    """Check an operation of your own against float64 on the CPU, forward and backward.

    function: called on `inputs` and `options` on the device. inputs, options: tensors in the dtype to check, and plain
    values. reference: a function of the same arguments that computes what `function` should; by default the function
    itself, in float64. device: by default the accelerator, else the CPU. Returns one check for each result, for each
    gradient of random ones of the results, and for each kind of extreme input; `wrong` says whether an error is beyond
    rounding (`referee.numerics.rounding.within_rounding`). NumericsError where nothing can be checked.
    """
    label = getattr(function, "__qualname__", type(function).__name__)
    if isinstance(function, nn.Module) or isinstance(reference, nn.Module):
        raise NumericsError(
            f"{label} cannot be checked: a module; fix: pass a function of its inputs and parameters "
            "(torch.func.functional_call)"
        )
    if any(tensor.is_nested for tensor in tensors_in([list(inputs), dict(options or {})])):
        raise NumericsError(f"{label} cannot be checked: nested tensors; fix: pass each of their tensors")
    call = FunctionCall(function, tuple(inputs), dict(options or {}))
    oracle = Oracle(usable_device(device, 'pass device="cpu"'))
    try:
        results = dataclasses.replace(call, function=reference or function).run(lambda tensor: tensor).results
    except Exception as error:  # torch raises many kinds
        which = "the reference" if reference else "it"
        raise NumericsError(
            f"{label} cannot be checked: {which} raised {described(error)}; fix: pass arguments that it takes"
        ) from error
    call = dataclasses.replace(call, received=random_gradients(results))
    oracle.check(Operation(label, label, call, reference))
    usual = {str(tensor.dtype).removeprefix("torch.") for tensor in call.tensors}
    for place, result in enumerate(results if reference else []):
        dtype = str(result.dtype).removeprefix("torch.")
        for number, check in enumerate(oracle.checks):
            of_result = (check.part, check.how) == (f"result {place}", DEVICE)
            if of_result and check.dtype != dtype and dtype in usual:
                why = f"dtype {check.dtype}, the reference returns {dtype}"
                oracle.checks[number] = dataclasses.replace(check, units=math.inf, why=why)
    if not oracle.checks:
        reasons = "; ".join(dict.fromkeys(skip.reason for skip in oracle.skipped)) or "nothing to compare"
        fix = "pass every tensor that it uses, with floating numbers, and return floating tensors"
        if RANDOM in reasons:
            fix = "pass the random numbers, or switch them off, as dropout by eval()"
        raise NumericsError(f"{label} cannot be checked: {reasons}; fix: {fix}")
    return oracle.checks


def random_gradients(results: Sequence[Tensor], seed: int = 2024) -> list[Tensor | None]:
    """Return a normal gradient for each real result."""
    draws = torch.Generator().manual_seed(seed)
    return [
        torch.randn(result.shape, generator=draws).to(result.dtype) if result.is_floating_point() else None
        for result in results
    ]


def missing(done: CallOutput, known: Float64Reference) -> Iterator[Error]:
    """Yield an error for each gradient that float64 has, not of zeros, and the device has not."""
    for place, (mine, other) in enumerate(zip(done.gradients, known.exact.gradients, strict=False)):
        if mine is None and other is not None and bool(other.any()):
            yield Error(f"gradient {place}", math.inf, known.bound, None, "no gradient")


# -- extreme inputs


def extreme_inputs(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield kinds of extreme values. Infinities and NaN of x remain, such as those of masked scores."""
    limits, finite = torch.finfo(x.dtype), x.isfinite()
    unit = x.double() / max(float(x[finite].double().abs().max()), limits.tiny)
    for kind, numbers in (
        ("zeros", torch.zeros_like(x)),
        ("large", (unit * limits.max**0.25).to(x.dtype)),
        ("subnormal", (unit * limits.tiny / 2).to(x.dtype)),
    ):
        yield kind, torch.where(finite, numbers, x)
    for kind, value in (("infinity", math.inf), ("NaN", math.nan)):
        changed = x.clone(memory_format=torch.contiguous_format)
        changed.view(-1)[0] = value
        yield kind, changed


def _tolerated(
    kind: str, operation: Operation, parts: Mapping[str, Tensor], known: Float64Reference, error: Error
) -> Error:
    """Return the error of extreme inputs without the elements in which correct devices differ."""
    result, exact = parts.get(error.part), known.exact.parts.get(error.part)
    if result is None or exact is None or not is_number(result) or result.shape != exact.shape:
        return error
    result = result.cpu()
    if kind == "subnormal":
        zeros = _with_first(operation, torch.zeros_like(operation.call.tensors[0]))
        flushed = zeros.in_float64(CallOutput([result]))
        if flushed is not None and (found := flushed.error(error.part, result)).within:
            return found  # subnormal inputs count as zero
        differ = (result == 0) & (exact.abs() < torch.finfo(result.dtype).tiny)
        differ |= result.isfinite() != exact.isfinite()  # of squares
    elif kind in ("infinity", "NaN"):
        lost = exact.isnan() & result.isfinite()
        if bool(lost.any()) and "softmax" not in operation.label and "attention" not in operation.label:
            return error
        differ = ~(exact.isfinite() & result.isfinite())
    else:
        return error
    return known.error(error.part, torch.where(differ, exact.to(result.dtype), result))


def _with_first(operation: Operation, values: Tensor) -> Operation:
    """Return the operation with other values of its first floating tensor, and without a backward."""
    todo = [values]

    def replaced(tensor: Tensor) -> Tensor:
        return todo.pop() if todo and tensor.is_floating_point() else tensor

    args = converted(list(operation.call.args), replaced)
    kwargs = converted(dict(operation.call.kwargs), replaced)
    call = dataclasses.replace(operation.call, args=args, kwargs=kwargs, received=None)
    return dataclasses.replace(operation, call=call, results=(), passed=())


def _in_float32(operation: Operation) -> Operation:
    """Return the operation on the same values in float32."""
    call = operation.call
    args, kwargs = converted(list(call.args), single), converted(dict(call.kwargs), single)
    received = None if call.received is None else converted(list(call.received), single)
    wide = dataclasses.replace(call, args=args, kwargs=kwargs, received=received)
    return dataclasses.replace(operation, call=wide, results=(), passed=(), autocast=None)


def _kind(operation: Operation) -> str:
    """Return what calls with equal behaviour on extreme values share."""
    parts = [operation.call.args, dict(operation.call.kwargs)]
    return repr((operation.label, converted(parts, lambda x: (x.dtype, x.dim())), operation.autocast))  # type: ignore[arg-type, return-value]


# -- devices


def usable_device(device: str | torch.device | None, fix: str = "--device cpu") -> torch.device:
    """Return a device, by default that of this machine. NumericsError where it cannot be used."""
    try:
        chosen = torch.device(device) if device else default_device()
        torch.ones(1, device=chosen)
    except Exception as error:  # torch raises many kinds for a device that is not there
        raise NumericsError(f"device {device} cannot be used: {described(error)}; fix: {fix}") from error
    return chosen


def default_device() -> torch.device:
    """Return the accelerator of this machine, or the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device(found.type) if found is not None else torch.device("cpu")


def digest_of(call: FunctionCall) -> str:
    """Return a checksum of the call's numbers: equal on two machines where both checked the same values."""
    total = 0
    for tensor in [*call.tensors, *(part for part in call.received or () if part is not None)]:
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
        total = zlib.crc32(flat.view(torch.uint8).numpy().data, total)
    return f"{total:08x}"
