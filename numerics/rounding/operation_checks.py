"""Check operations on a device against float64 on the CPU: in their dtype, in float32, and on extreme inputs.

Extreme inputs are zeros, large and subnormal numbers, an infinity and a NaN in the first floating argument, forward
only. Large numbers are at most the fourth root of the largest one, so that products of three of them are finite. A
lost NaN is wrong, but for softmax and attention, whose masks are infinities. Other places of infinities and NaN, and
subnormal numbers that count as zero, are notes: correct devices differ there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from numerics.describe import tensors_in
from numerics.errors import NumericsError, described
from numerics.rounding.within_rounding import (
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
RECORDED, GENERATED, GIVEN = "recorded", "generated", "given"  # origins of values
DEVICE, FLOAT32 = "device", "device, float32"  # runs, beside RECORDED and the kinds of extreme inputs
WRONG, ROUNDING, NOTE = VERDICTS = ("wrong", "rounding", "note")
LARGEST = 1 << 22  # elements of an operation that is run on extreme inputs


@dataclass(frozen=True)
class Operation:
    """A call to check, with its tensors on the CPU in the dtype of the call."""

    name: str
    label: str  # the function, as in "Functional.gelu"
    call: FunctionCall
    reference: Callable[..., Any] | None = None  # computes the same in float64; None: the function itself
    values: str = GIVEN
    results: Sequence[Tensor] = ()  # recorded
    passed: Sequence[Tensor | None] = ()  # recorded gradients of the floating inputs
    autocast: torch.dtype | None = None
    on_device: bool = True
    dtypes: Sequence[torch.dtype] = ()  # of the reference's results; empty where unknown

    def in_float64(self, done: CallOutput) -> Float64Reference | None:
        """Return the reference for results; None where the call is random."""
        call = dataclasses.replace(self.call, function=self.reference or self.call.function)
        return in_float64(call, coarsest(self.call, done))


@dataclass(frozen=True)
class Check:
    """The error of a result or a gradient of one operation."""

    name: str
    label: str
    part: str  # "result 0", "gradient 1" of the floating inputs, or "arguments"
    dtype: str
    how: str  # DEVICE, FLOAT32, RECORDED, or the kind of extreme input
    values: str  # the origin of the inputs
    units: float
    bound: float
    why: str = ""  # what no number says; of a note, the fact
    digest: str = ""  # of the inputs

    @property
    def verdict(self) -> str:
        if self.units > self.bound:
            return WRONG
        return NOTE if self.why else ROUNDING

    @property
    def wrong(self) -> bool:
        return self.verdict == WRONG

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
    """Checks operations on a device. around: a context of each run there. checks, skipped: of all operations so far."""

    device: torch.device = field(default_factory=lambda: default_device())
    around: Around = contextlib.nullcontext
    extremes: bool = True
    checks: list[Check] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    _tried: set[str] = field(default_factory=set)  # kinds of calls that were run on extreme inputs

    def check(self, operation: Operation) -> list[Check]:
        """Check one operation. Returns its checks, and adds them to `checks`; `skipped` has reasons."""
        before = len(self.checks)
        if not operation.call.tensors:
            self._skip(operation, "no floating tensor")
        elif operation.results and not self._judge(operation, RECORDED):
            return []
        elif operation.on_device and self._judge(operation, DEVICE):
            tensors = operation.call.tensors
            if {tensor.dtype for tensor in tensors} & {torch.bfloat16, torch.float16} or operation.autocast:
                self._judge(_in_float32(operation), FLOAT32)
            kind = _kind(operation)
            if self.extremes and kind not in self._tried:
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
        if how == DEVICE:
            for place, (result, dtype) in enumerate(zip(done.results, operation.dtypes, strict=False)):
                if result.dtype != dtype and dtype in {tensor.dtype for tensor in operation.call.tensors}:
                    why = f"dtype {result.dtype}, the reference returns {dtype}"
                    self._add(
                        operation, how, Error(f"result {place}", math.inf, known.bound, result.dtype, why)
                    )
            if not done.results:
                self._skip(operation, "it returns no tensor")
        return True

    def _refused(self, operation: Operation, error: Exception) -> None:
        """Report a call that float64 refuses: a finding where the CPU refuses a recorded one in its dtype, too."""
        reason = described(error)
        try:
            dataclasses.replace(operation.call, function=operation.reference or operation.call.function).run(
                lambda tensor: tensor
            )
        except Exception:
            if operation.values != GIVEN:
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
                found = [self._extreme(kind, changed, done, known, error) for error in known.errors(done)]
            except Exception as error:  # an operation that refuses such values, as a Cholesky decomposition
                self._skip(operation, f"{kind}: {described(error)}")
                continue
            for each in found:
                self._add(operation, kind, each)

    def _extreme(
        self, kind: str, operation: Operation, done: CallOutput, known: Float64Reference, error: Error
    ) -> Error:
        """Return the error of a result of extreme inputs, or a note in its place."""
        result = dict(done.parts).get(error.part)
        if error.within or result is None or not is_number(result) or "shape" in error.why:
            return error
        if kind == "subnormal":
            zeros = _with_first(operation, torch.zeros_like(operation.call.tensors[0])).in_float64(done)
            return error if zeros is None else flushed(error, result, known, zeros.error(error.part, result))
        return elsewhere(error, result, known, operation.label) if kind in ("infinity", "NaN") else error

    def _add(self, operation: Operation, how: str, error: Error, digest: str = "") -> None:
        dtype = str(error.dtype or "").removeprefix("torch.")
        values = operation.values if how in (DEVICE, FLOAT32, RECORDED) else "extreme"
        numbers = error.units, error.bound, error.why, digest
        self.checks.append(Check(operation.name, operation.label, error.part, dtype, how, values, *numbers))

    def _skip(self, operation: Operation, reason: str) -> None:
        self.skipped.append(Skipped(operation.name, operation.label, reason))


def check_operation(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    *,
    reference: Callable[..., Any] | None = None,
    received: Sequence[Tensor | None] | None = None,
    device: str | torch.device | None = None,
    name: str = "",
    around: Around = contextlib.nullcontext,
) -> list[Check]:
    """Check an operation of your own against float64 on the CPU, forward and backward.

    function: called on `inputs` and `options` on the device. inputs, options: tensors in the dtype to check, and plain
    values. reference: a function of the same arguments that computes what `function` should; by default the function
    itself, in float64. Modules are copied, and their parameters are arguments after the inputs. received: gradients of
    the results, random by default. device: by default the accelerator, else the CPU. Returns one check for each result
    and gradient, and for each kind of extreme input; `wrong` says whether an error is beyond rounding
    (`numerics.rounding.within_rounding`). NumericsError where nothing can be checked.
    """
    label = name or getattr(function, "__qualname__", type(function).__name__)
    if any(tensor.is_nested for tensor in tensors_in([list(inputs), dict(options or {})])):
        raise NumericsError(f"{label} cannot be checked: nested tensors; fix: pass each of their tensors")
    call, right = with_parameters(
        FunctionCall(function, tuple(inputs), dict(options or {})), reference, label
    )
    oracle = Oracle(usable_device(device, 'pass device="cpu"'), around)
    try:
        results = (
            dataclasses.replace(call, function=right or call.function).run(lambda tensor: tensor).results
        )
    except Exception as error:  # torch raises many kinds
        which = "the reference" if reference else "it"
        raise NumericsError(
            f"{label} cannot be checked: {which} raised {described(error)}; fix: pass arguments that it takes"
        ) from error
    given = random_gradients(results) if received is None else received
    dtypes = [result.dtype for result in results] if right else []
    oracle.check(Operation(label, label, dataclasses.replace(call, received=given), right, dtypes=dtypes))
    if not oracle.checks:
        reasons = "; ".join(dict.fromkeys(skip.reason for skip in oracle.skipped)) or "nothing to compare"
        fix = "pass every tensor that it uses, with floating numbers, and return floating tensors"
        if RANDOM in reasons:
            fix = "pass the random numbers, or switch them off, as dropout by eval()"
        raise NumericsError(f"{label} cannot be checked: {reasons}; fix: {fix}")
    return oracle.checks


def with_parameters(
    call: FunctionCall, reference: Callable[..., Any] | None, name: str
) -> tuple[FunctionCall, Callable[..., Any] | None]:
    """Return a call and its reference whose last argument is the state of their modules; as given without one.

    The modules are deep copies. NumericsError where one cannot be copied.
    """
    modules = [call.function, reference]
    if not any(isinstance(module, nn.Module) for module in modules):
        return call, reference
    states = [
        {**dict(module.named_parameters()), **dict(module.named_buffers())}
        if isinstance(module, nn.Module)
        else {}
        for module in modules
    ]
    wanted = [True for tensor in tensors_in(list(call.args)) if is_number(tensor)]
    for place, state in enumerate(states):
        wanted += [place == 0 and tensor.requires_grad for tensor in state.values() if is_number(tensor)]
    function, right = (_stateless(module, place, name) for place, module in enumerate(modules))
    assert function is not None
    return FunctionCall(function, (*call.args, states), call.kwargs, None, wanted), right


def _stateless(given: Any, place: int, name: str) -> Callable[..., Any] | None:
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


def flushed(error: Error, result: Tensor, known: Float64Reference, of_zeros: Error) -> Error:
    """Return the error of subnormal inputs: a note where inputs or results that count as zero explain it."""
    exact, tiny = dict(known.exact.parts)[error.part], torch.finfo(result.dtype).tiny
    if of_zeros.within:
        return dataclasses.replace(of_zeros, why="subnormal inputs count as zero")
    if error.why:
        return dataclasses.replace(error, units=0.0, why=f"squares of subnormal inputs: {error.why}")
    zeros = (result.cpu() == 0) & (exact.abs() < tiny)
    rest = known.error(error.part, torch.where(zeros, exact.to(result.dtype), result.cpu()))
    return dataclasses.replace(rest, why="subnormal results count as zero") if rest.within else error


def elsewhere(error: Error, result: Tensor, known: Float64Reference, label: str) -> Error:
    """Return the error of inputs with an infinity or a NaN: a note where others than float64's are not finite."""
    exact = dict(known.exact.parts)[error.part]
    lost = exact.isnan() & result.cpu().isfinite()
    if bool(lost.any()) and "softmax" not in label and "attention" not in label:
        return error
    finite = exact.isfinite() & result.cpu().isfinite()
    rest = known.error(error.part, torch.where(finite, result.cpu(), exact.to(result.dtype)))
    return dataclasses.replace(rest, why=rest.why or error.why)


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
    return dataclasses.replace(operation, call=wide, results=(), passed=(), autocast=None, dtypes=())


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
