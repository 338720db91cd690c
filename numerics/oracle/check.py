"""Check an operation: its device against float64 on the CPU, in the dtype of the call and in float32."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from numerics.describe import tensors_in
from numerics.errors import NumericsError, described
from numerics.oracle.extremes import LARGEST, extreme_checks
from numerics.oracle.masks import misread_mask
from numerics.oracle.operation import (
    GIVEN,
    Computed,
    Operation,
    Reference,
    compute,
    converted,
    judged,
    reference,
    with_parameters,
)
from numerics.oracle.results import DEVICE, RECORDED_RUN, Check, Skipped
from numerics.oracle.rounding_model.linear_algebra import ill_conditioned
from numerics.oracle.rounding_model.measure import STAGES, Measure, measure_exact
from numerics.oracle.rounding_model.randomness import RANDOM, Randomness

Around = Callable[[], AbstractContextManager[Any]]


@dataclass
class Oracle:
    """Checks operations on a device. around: a context of each run on the device. extremes: also on extreme values.

    checks, skipped: what was found so far.
    """

    device: torch.device = field(default_factory=lambda: default_device())
    around: Around = contextlib.nullcontext
    extremes: bool = True
    checks: list[Check] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    _tried: set[str] = field(default_factory=set)  # kinds of calls that were run on extreme values

    def check(self, operation: Operation) -> list[Check]:
        """Check one operation. Returns its checks, and adds them to `checks`; `skipped` has reasons."""
        found: list[Check] = []
        if operation.dtype is None:
            self._skip(operation, "no floating tensor")
            return found
        if why := misread_mask(operation):
            found.append(self._failed(operation, why))
        if why := ill_conditioned(operation.label, operation.floating[0], operation.dtype):
            self._skip(operation, why)
            return found
        try:
            with Randomness(self.device, always=operation.values == GIVEN) as drawn:
                exact = reference(operation)
            if drawn.differ(exact.exact, lambda: reference(operation).exact):
                self._skip(operation, RANDOM)
                return found
            exact.extend(STAGES[0])
        except Exception as error:  # torch raises many kinds
            return [*found, *self._refused(operation, error, found)]
        digest = digest_of(operation)
        if operation.results:
            done = Computed(list(operation.results), list(operation.passed))
            found += _checks(operation, RECORDED_RUN, done, exact, digest)
        if operation.on_device:
            for how, changed in self._variants(operation):
                try:
                    with Randomness(self.device, always=operation.values == GIVEN) as drawn:
                        done = self.run(changed)
                    if drawn.differ(done, lambda changed=changed: self.run(changed)):  # type: ignore[misc]
                        self._skip(operation, RANDOM)
                        break
                    known = exact if changed is operation else reference(changed)
                    known.extend(STAGES[0])
                except Exception as error:
                    self._skip(operation, f"{how}: {described(error)}")
                    continue
                found += _checks(changed, how, done, known, digest)
                if how == DEVICE:
                    self._skip_results(operation, done, known)
            if not drawn.found and self.extremes and (kind := _kind(operation)) not in self._tried:
                self._tried.add(kind)
                if sum(tensor.numel() for tensor in operation.floating) > LARGEST:
                    self._skip(operation, f"extremes: over {LARGEST:,} elements")
                else:
                    extreme = list(extreme_checks(operation, self.run))
                    found += [check for check in extreme if isinstance(check, Check)]
                    self.skipped += [skip for skip in extreme if isinstance(skip, Skipped)]
        found = [check for check in found if check.measured.elements or check.wrong]
        self.checks += found
        return found

    def run(self, operation: Operation) -> Computed:
        """Run an operation on the device, forward and backward."""
        with contextlib.ExitStack() as stack:
            if operation.autocast:
                stack.enter_context(torch.autocast(self.device.type, dtype=operation.autocast))
            stack.enter_context(self.around())
            return compute(operation, operation.function, lambda tensor: tensor.to(self.device))

    def _variants(self, operation: Operation) -> Iterator[tuple[str, Operation]]:
        yield DEVICE, operation
        narrow = {tensor.dtype for tensor in operation.floating} | {operation.autocast}
        if narrow & {torch.bfloat16, torch.float16}:
            yield f"{DEVICE}, float32", _in_float32(operation)

    def _failed(self, operation: Operation, why: str) -> Check:
        measured = Measure(0, ratio=float("inf"), why=why)
        return Check(
            operation.name, operation.label, "forward", "arguments", "", DEVICE, operation.values, measured
        )

    def _refused(self, operation: Operation, error: Exception, found: list[Check]) -> list[Check]:
        """Report a call that float64 refuses: a finding where the CPU refuses it in its dtype as well."""
        reason = described(error)
        try:
            compute(operation, operation.reference or operation.function, lambda tensor: tensor)
        except Exception as again:
            if operation.values == GIVEN:
                self._skip(
                    operation, f"{'the reference' if operation.reference else 'it'} raised {described(again)}"
                )
            elif not found:
                found.append(self._failed(operation, f"the CPU refuses these arguments: {reason}"))
            self.checks += found
            return []
        self._skip(operation, f"no float64: {reason}")
        self.checks += found
        return []

    def _skip(self, operation: Operation, reason: str) -> None:
        self.skipped.append(Skipped(operation.name, operation.label, reason))

    def _skip_results(self, operation: Operation, done: Computed, known: Reference) -> None:
        """Say which results are not compared."""
        if not done.results:
            self._skip(operation, "it returns no tensor")
        for place, result in enumerate(done.results):
            if not result.numel():
                self._skip(operation, f"result {place} has no elements")
            elif (left := _left_out(result, known, place)) is not None and (count := int(left.sum())):
                self._skip(
                    operation,
                    f"result {place} has integers, which a rounding error may change: "
                    f"{count:,} of {result.numel():,}",
                )


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
    and gradient, and for each kind of extreme input; `wrong` says whether an error is beyond what rounding allows
    (docs/oracle.md). NumericsError where nothing can be checked.
    """
    label = name or getattr(function, "__qualname__", type(function).__name__)
    if any(tensor.is_nested for tensor in tensors_in([list(inputs), dict(options or {})])):
        raise NumericsError(f"{label} cannot be checked: nested tensors; fix: pass each of their tensors")
    operation = with_parameters(
        Operation(label, label, function, tuple(inputs), dict(options or {}), reference)
    )
    oracle = Oracle(usable_device(device, 'pass device="cpu"'), around)
    results = _own_results(operation)
    if received is None:
        received = _gradients(results)
    if operation.reference and results:
        operation = dataclasses.replace(operation, dtypes=[result.dtype for result in results])
    oracle.check(dataclasses.replace(operation, received=received, values=GIVEN))
    if not oracle.checks:
        reasons = (
            "; ".join(dict.fromkeys(skip.reason for skip in oracle.skipped)) or "there is nothing to compare"
        )
        fix = "pass every tensor that it uses, with floating numbers, and return floating tensors"
        if RANDOM in reasons:
            fix = "pass the random numbers, or switch them off, as dropout by eval()"
        raise NumericsError(f"{label} cannot be checked: {reasons}; fix: {fix}")
    return oracle.checks


def random_gradients(operation: Operation, seed: int = 2024) -> list[Tensor | None] | None:
    """Return normal gradients for the results of an operation; None where none can be differentiated."""
    return _gradients(_own_results(operation), seed)


def _own_results(operation: Operation) -> list[Tensor] | None:
    """Return the results of the reference in the dtype of the arguments; None where it raises."""
    try:
        return compute(
            dataclasses.replace(operation, received=None),
            operation.reference or operation.function,
            lambda x: x,
        ).results
    except Exception:  # `Oracle.check` reports it
        return None


def _gradients(results: list[Tensor] | None, seed: int = 2024) -> list[Tensor | None] | None:
    if results is None:
        return None
    draws = torch.Generator().manual_seed(seed)
    return [
        torch.randn(result.shape, generator=draws).to(result.dtype) if result.is_floating_point() else None
        for result in results
    ]


def usable_device(device: str | torch.device | None, fix: str = "--device cpu") -> torch.device:
    """Return a device, by default that of this machine. NumericsError where it cannot be used."""
    try:
        chosen = torch.device(device) if device else default_device()
        torch.ones(1, device=chosen)
    except Exception as error:  # torch raises many kinds for a device that is not there
        reason = str(error).partition("\n")[0]
        raise NumericsError(f"device {device} cannot be used: {reason}; fix: {fix}") from error
    return chosen


def default_device() -> torch.device:
    """Return the accelerator of this machine, or the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device(found.type) if found is not None else torch.device("cpu")


def digest_of(operation: Operation) -> str:
    """Return a checksum of the call's tensors: equal on two machines where both checked the same values."""
    total = 0
    for tensor in [*operation.floating, *(part for part in operation.received or () if part is not None)]:
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
        total = zlib.crc32(flat.view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _checks(operation: Operation, how: str, done: Computed, known: Reference, digest: str) -> Iterator[Check]:
    def check(direction: str, part: str, measured: Measure, dtype: torch.dtype) -> Check:
        name = str(dtype).removeprefix("torch.")
        return Check(
            operation.name,
            operation.label,
            direction,
            part,
            name,
            how,
            operation.values,
            measured,
            known.derivation,
            digest,
        )

    if len(done.results) != len(known.exact.results):
        why = f"{len(done.results)} results, {len(known.exact.results)} in float64"
        yield check("forward", "result", Measure(0, ratio=float("inf"), why=why), torch.float64)
        return
    for place, result in enumerate(done.results):
        exact = known.exact.results[place]
        if not result.is_floating_point() and not result.is_complex():
            left = _left_out(result, known, place)
            if left is None or not bool(left.all()):
                compared = None if left is None else ~left
                measured = measure_exact(result.cpu(), exact, compared)
                yield check("forward", f"result {place}", measured, result.dtype)
            continue
        measured = judged(result, known, "forward", place, _real(result.dtype), STAGES[0])
        if why := _other_dtype(operation, place, result) if how == DEVICE else "":
            measured = dataclasses.replace(measured, ratio=float("inf"), why=why)
        yield check("forward", f"result {place}", measured, result.dtype)
    complete = all(
        mine is not None
        for mine, other in zip(done.gradients, known.exact.gradients, strict=False)
        if other is not None
    )
    if how == RECORDED_RUN and not complete:
        return  # one tensor that is passed twice has one recorded gradient
    for place, (mine, other) in enumerate(zip(done.gradients, known.exact.gradients, strict=False)):
        if other is None:
            continue
        if mine is None:
            if bool(other.any()):
                missing = Measure(other.numel(), ratio=float("inf"), why="no gradient")
                yield check("backward", f"gradient {place}", missing, operation.floating[place].dtype)
            continue
        coarse = operation.autocast or mine.dtype
        measured = judged(mine, known, "backward", place, _real(coarse), STAGES[0])
        yield check("backward", f"gradient {place}", measured, mine.dtype)


def _left_out(result: Tensor, known: Reference, place: int) -> Tensor | None:
    """Return which integers a rounding error may change; None where the result has none, or is that of float64."""
    if result.is_floating_point() or result.is_complex() or place >= len(known.exact.results):
        return None
    exact = known.exact.results[place]
    return None if torch.equal(result.cpu(), exact) else known.unstable(place)


def _other_dtype(operation: Operation, place: int, result: Tensor) -> str:
    """Say that a result has another dtype than the reference's; "" where that is not one of the inputs' dtypes."""
    expected = operation.dtypes[place] if place < len(operation.dtypes) else result.dtype
    if expected == result.dtype or expected not in {tensor.dtype for tensor in operation.floating}:
        return ""
    return f"dtype {result.dtype}, the reference returns {expected}"


def _real(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def _in_float32(operation: Operation) -> Operation:
    """Return the operation on the same values in float32."""

    def single(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

    return dataclasses.replace(
        operation,
        args=converted(list(operation.args), single),
        kwargs=converted(dict(operation.kwargs), single),
        received=None
        if operation.received is None
        else [None if part is None else single(part) for part in operation.received],
        results=(),
        passed=(),
        autocast=None,
    )


def _kind(operation: Operation) -> str:
    """Return what calls with equal behaviour on extreme values share."""

    def described(value: Any) -> Any:
        return converted(value, lambda tensor: (tensor.dtype, tensor.dim()))

    return repr(
        (
            operation.label,
            described(list(operation.args)),
            described(dict(operation.kwargs)),
            operation.autocast,
        )
    )
