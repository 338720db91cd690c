"""Run an operation on extreme inputs: zeros, large and subnormal numbers, an infinity, a NaN.

The expected result is float64's, rounded to the dtype. Large numbers are at most the fourth root of the largest one,
so that products of three of them and sums of them are finite. A subnormal input or result may count as zero: devices
flush them, and the check says so. An infinity or a NaN must reach the results that it reaches in float64. Where it
reaches further, as between the tiles of a fused kernel, that is a note, except where the operation is element by
element. Where it is lost, that is a note for softmax and attention, whose masks are infinities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from numerics.errors import described
from numerics.oracle.operation import Computed, Operation, Reference, converted, judged, reference
from numerics.oracle.results import Check, Skipped
from numerics.oracle.rounding_model.measure import Measure

Run = Callable[[Operation], Computed]
LARGEST = 1 << 22  # elements of an operation that is run on extreme inputs
SAMPLES = 2  # runs of the first stage
ELEMENTWISE = ("arithmetic", "division", "function", "GELU")
ORDINARY = (
    *ELEMENTWISE,
    "sum",
    "matrix product",
    "matrix product and sum",
    "linear layer",
    "norm of rows",
    "scatter-add",
)


class ZerosRefusedError(Exception):
    """The reference refuses zeros, so that flushed subnormal inputs cannot be accepted."""


def extreme_checks(operation: Operation, run: Run) -> Iterator[Check | Skipped]:
    """Check the results of an operation on extreme values of its first floating argument, forward only.

    Skipped has the reason where the operation refuses a kind of values.
    """
    x = operation.floating[0]
    if not x.numel():
        return
    if x.is_complex() or x.dtype == torch.float64 or not bool(x.isfinite().any()):
        return
    for kind, values in _inputs(x):
        changed = _with_first(operation, values)
        try:
            known = reference(changed)
            known.extend(SAMPLES)
            done = run(changed)
        except Exception as error:  # an operation that refuses such values, as a Cholesky decomposition
            yield Skipped(operation.name, operation.label, f"{kind}: {described(error)}")
            continue
        try:
            yield from list(_compared(kind, changed, known, done))
        except ZerosRefusedError as error:
            yield Skipped(operation.name, operation.label, f"{kind}, as zeros: {error}")


def _compared(kind: str, operation: Operation, known: Reference, done: Computed) -> Iterator[Check]:
    """Compare the results of extreme inputs. ZerosRefusedError where zeros are needed and refused."""
    for place, (result, exact) in enumerate(zip(done.results, known.exact.results, strict=False)):
        if not result.is_floating_point():
            continue
        extra = 0.0
        if kind == "subnormal":  # each term of a sum may be rounded to a multiple of the smallest number
            limits = torch.finfo(result.dtype)
            extra = known.longest * limits.tiny * limits.eps * bool(known.rules)
        measured = judged(result, known, "forward", place, result.dtype, SAMPLES, extra)
        measured, remark = _judged(kind, measured, result, exact, known, operation)
        yield Check(
            operation.name,
            operation.label,
            "forward",
            f"result {place}",
            str(result.dtype).removeprefix("torch."),
            kind,
            "extreme",
            measured,
            known.derivation,
            remark=remark,
        )


def _inputs(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield kinds of extreme values. Infinities and NaN of x remain, such as those of masked scores."""
    limits, finite = torch.finfo(x.dtype), x.isfinite()
    unit = x.double() / max(float(x[finite].double().abs().max()), limits.tiny)
    for kind, numbers in (
        ("zeros", torch.zeros_like(x)),
        ("large", (unit * limits.max**0.25).to(x.dtype)),
        ("subnormal", (unit * limits.tiny / 2).to(x.dtype)),
    ):
        yield kind, torch.where(finite, numbers, x)
    for kind, value in (("infinity", float("inf")), ("NaN", float("nan"))):
        changed = x.clone(memory_format=torch.contiguous_format)
        changed.view(-1)[0] = value
        yield kind, changed


def _with_first(operation: Operation, values: Tensor) -> Operation:
    """Return the operation with other values of its first floating tensor, and without a backward."""
    todo = [values]

    def replaced(tensor: Tensor) -> Tensor:
        return todo.pop() if todo and tensor.is_floating_point() else tensor

    args = converted(list(operation.args), replaced)
    kwargs = converted(dict(operation.kwargs), replaced)
    return dataclasses.replace(operation, args=args, kwargs=kwargs, received=None, results=(), passed=())


def _judged(
    kind: str, measured: Measure, result: Tensor, exact: Tensor, known: Reference, operation: Operation
) -> tuple[Measure, str]:
    if kind == "subnormal":
        return _subnormal(measured, result, exact, operation)
    if kind not in ("infinity", "NaN") or not measured.why:
        return measured, ""
    x, y = result.detach().cpu().double(), exact
    if x.shape != y.shape:
        return measured, ""
    lost, further = int((x.isfinite() & ~y.isfinite()).sum()), int((~x.isfinite() & y.isfinite()).sum())
    kinds = {rule.kind for rule in known.rules.values()}
    if (lost and kinds <= set(ORDINARY)) or (further and kinds <= set(ELEMENTWISE)):
        return measured, ""
    parts = [
        f"{lost:,} results are finite that are not in float64" if lost else "",
        f"{further:,} results are not finite that are in float64" if further else "",
    ]
    remark = "; ".join(filter(None, parts)) or f"Inf and NaN are exchanged: {measured.why}"
    return dataclasses.replace(measured, ratio=0.0, why=""), remark


def _subnormal(measured: Measure, result: Tensor, exact: Tensor, operation: Operation) -> tuple[Measure, str]:
    """Accept a result of the inputs as they are, or of zeros in their place."""
    if not measured.wrong:
        return measured, "subnormal results are flushed to zero" if measured.flushed else ""
    try:
        zeros = reference(_with_first(operation, torch.zeros_like(operation.floating[0])))
        zeros.extend(SAMPLES)
    except Exception as error:  # torch raises many kinds
        raise ZerosRefusedError(described(error)) from error
    for place, other in enumerate(zeros.exact.results):
        if other.shape != exact.shape:
            continue
        if not other.is_floating_point():
            continue
        flushed = judged(result, zeros, "forward", place, result.dtype, SAMPLES)
        if not flushed.wrong:
            return flushed, "subnormal inputs are flushed to zero"
        finite = result.detach().cpu().isfinite()
        if not finite.all() and torch.equal(finite, other.isfinite()):  # a division by a norm
            return dataclasses.replace(
                measured, ratio=0.0, why=""
            ), "Inf or NaN where zeros give them: squares of subnormal inputs are zero"
    return measured, ""
