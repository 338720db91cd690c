"""Check the interface: shapes, dtypes, errors at any length, the input unchanged, finite values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2.training_step import Stepper
from gpt2.transformer import learned_scalars
from ra.admission.causality import MODES
from ra.admission.probe import (
    ALL_DTYPES,
    OPTIMIZER,
    VOCABULARY,
    Probe,
    examined_part,
    inputs,
    pristine,
    run,
    seed_generators,
)
from ra.admission.results import Violation, describe, error_line, violation
from runtime.batch_plan import plan_batch
from runtime.errors import source_line

SHAPE, INPLACE, FINITE, STEP = "shape", "inplace", "finite", "step"
SCALES = (1e-4, 1e-2, 30.0, 1e4)  # of the inputs; the scores are their squares
# beyond it torch's own attention has no finite backward: it recomputes exp(score - logsumexp), and the rounding of
# scores of 1e8 is above 88
LARGEST_BACKWARD = 30.0
CPU_FIX = (
    "the examination runs on a CPU, so give the attention the same function there, such as written-out scores where "
    'q.device.type == "cpu"; the trained model of each run is examined on its device'
)
FUSED_FIX = "give q, k and v one head size and the mask four dimensions, or write the softmax out"


def shape(probe: Probe) -> Iterator[Violation]:
    """(B, T, C) in, (B, T, C) out, same dtype and device, at every length and at the study's width."""
    dtypes = probe.dtypes or ALL_DTYPES[-1:]
    small = probe.model("initial", dtypes[-1])
    for number, layer in enumerate(probe.layers):
        module = examined_part(small, number)
        for tokens in [*reversed(probe.lengths), *([probe.full] if number in probe.edges else [])]:
            for dtype in dtypes if tokens == probe.ordinary else dtypes[-1:]:
                attention = examined_part(probe.model("initial", dtype), number)
                rows = 1 if tokens > probe.ordinary else 2
                fault = _fault(layer, attention, inputs(rows, tokens, probe.shape.width, dtype))
                if fault:
                    yield fault
                    break
            else:
                continue
            break
    if probe.shape != probe.study:
        layer = probe.layers[-1]
        module = examined_part(probe.model("initial", dtypes[-1], probe.study, (layer,)), 0)
        fault = _fault(layer, module, inputs(2, probe.ordinary, probe.study.width, dtypes[-1]))
        if fault:
            yield fault


def _fault(layer: int, module: nn.Module, x_BTC: Tensor) -> Violation | None:
    """The first fault of a pass in training or in evaluation."""
    wanted = f"the input is {_tensor(x_BTC)}, and the output must be the same"
    for training in (True, False):
        how = f"{MODES[training]}, {x_BTC.shape[1]} tokens"
        try:
            y = run(module, x_BTC, training, grad=training)
            if training and isinstance(y, Tensor) and y.requires_grad:
                y.sum().backward()
        except (Exception, SystemExit) as error:
            explained = _attend_fault(module, x_BTC, training)
            found = error_line(error)
            function = f" in {found[2]}" if found else ""
            absent = isinstance(error, NotImplementedError) and "CPU" in str(error)
            return violation(
                explained or f"{describe(error)}{function} ({how})",
                CPU_FIX if absent else "correct that line; every length from 1 to the block size must work",
                module,
                None if explained else error,
                layer=layer,
            )
        if (
            type(y) is not Tensor
            or y.shape != x_BTC.shape
            or y.dtype != x_BTC.dtype
            or y.device != x_BTC.device
        ):
            message = (
                _attend_fault(module, x_BTC, training) or f"forward returns {_tensor(y)} ({how}); {wanted}"
            )
            return violation(message, "return (B, T, C) of x's dtype and device", module, layer=layer)
    return None


def _attend_fault(module: nn.Module, x_BTC: Tensor, training: bool) -> str:
    """The result of `attend` where it has another shape than the values; "" otherwise."""
    if not (hasattr(module, "attend") and hasattr(module, "project")):
        return ""
    used: Any = pristine(module).train(training)
    try:
        q, k, v = used.project(x_BTC)
        seed_generators()
        y = used.attend(q, k, v)
    except (Exception, SystemExit):
        return ""
    if isinstance(y, Tensor) and y.shape == v.shape and y.dtype == v.dtype:
        return ""
    found = source_line(module, ("attend",))
    line = f" at line {found[1]}" if found else ""
    return f"attend{line} returns {_tensor(y)}; it must return {_tensor(v)}, as v is"


def _tensor(value: Any) -> str:
    if type(value) is not Tensor:
        return f"{type(value).__name__}, not a plain tensor,"
    device = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{device}"


def inplace(probe: Probe) -> Iterator[Violation]:
    """A call leaves its input unchanged."""
    dtype = ALL_DTYPES[-1]
    for layer, module in probe.parts("initial", dtype):
        x_BTC = inputs(2, probe.ordinary, probe.shape.width, dtype)
        for training in (True, False):
            given = x_BTC.clone()
            seed_generators()
            try:
                with torch.no_grad():
                    pristine(module).train(training)(given)
            except (Exception, SystemExit):  # the check "shape" reports it
                return
            if not torch.equal(given, x_BTC):
                size = float((given - x_BTC).abs().max() / x_BTC.abs().max())
                yield violation(
                    f"the call changes its input by {size:.2g} of the largest value ({MODES[training]})",
                    "replace in-place operations on x (+=, mul_, copy_) by new tensors",
                    module,
                    layer=layer,
                    size=size,
                )
                break


def finite(probe: Probe) -> Iterator[Violation]:
    """Finite outputs and gradients for small, large, equal and zero inputs."""
    dtype, width = torch.float32 if torch.float32 in probe.dtypes else probe.dtypes[-1], probe.shape.width
    x_BTC = inputs(2, probe.ordinary, width, dtype)
    forward_only = {
        "inputs of zero",
        *(f"inputs times {scale:g}" for scale in SCALES if scale > LARGEST_BACKWARD),
    }
    cases = {f"inputs times {scale:g}": scale * x_BTC for scale in SCALES}
    cases["equal inputs at all positions"] = x_BTC[:, :1].expand_as(x_BTC).contiguous()
    cases["inputs of zero"] = torch.zeros_like(x_BTC)
    cases["one token"] = x_BTC[:, :1]
    cases = {"ordinary inputs": x_BTC} | cases
    for weights in ("initial", "perturbed"):
        for layer, module in probe.parts(weights, dtype):
            for case, given in cases.items():
                fault = _not_finite(module, given, case not in forward_only)
                if fault:
                    yield violation(
                        f"the {fault} is NaN or infinite for {case} ({weights} weights, {given.shape[1]} tokens)",
                        "subtract the row's maximum before exp, and add a small number to denominators and under roots",
                        module,
                        layer=layer,
                    )
                    return
    yield from _autocast(probe, x_BTC)


def _not_finite(module: nn.Module, x_BTC: Tensor, backward: bool) -> str:
    """Name what is not finite; "" if everything is."""
    leaf = x_BTC.clone().requires_grad_()
    y_BTC = run(module, leaf, grad=True)
    if not bool(y_BTC.isfinite().all()):
        return "output"
    if backward and y_BTC.requires_grad:
        y_BTC.sum().backward()
        if leaf.grad is not None and not bool(leaf.grad.isfinite().all()):
            return "gradient of the input"
    return ""


def _autocast(probe: Probe, x_BTC: Tensor) -> Iterator[Violation]:
    """Under the study's bfloat16 autocast the attention runs and is finite."""
    if not probe.autocast or torch.float32 not in probe.dtypes:
        return
    for layer, module in probe.parts("initial", torch.float32):
        error: BaseException | None = None
        try:
            with torch.autocast("cpu", torch.bfloat16):
                fault = _not_finite(module, x_BTC, backward=True)
        except (Exception, SystemExit) as raised:
            fault, error = describe(raised), raised
        if fault:
            message = f"{fault}{'' if error else ' is NaN or infinite'} under bfloat16 autocast"
            fix = "cast tensors to the dtype of q, k and v before an operation on both"
            yield violation(message, fix, module, error, layer=layer)
            return


def step(probe: Probe) -> Iterator[Violation]:
    """Two training steps at the small shape, as a study makes them: micro-batches, AdamW, parameter groups.

    In float32 without dropout only the fused kernel of a CPU is allowed, as in training there
    (runtime.attention_kernels).
    """
    shape = replace(probe.shape, block_size=probe.ordinary, vocabulary=VOCABULARY, padded_vocabulary=64)
    ids_ET = torch.arange(4 * (probe.ordinary + 1)).view(4, -1) * 7 % VOCABULARY
    module = None
    try:
        parts = probe.model_parts(shape)
        batch = plan_batch(4, 2, 1, probe.ordinary)
        stepper = Stepper(
            shape, OPTIMIZER, batch, seed=0, device="cpu", dtype="float32", compile=False, parts=parts
        )
        module = examined_part(stepper.model, 0)
        anything = probe.autocast or probe.study.dropout > 0
        kernels = contextlib.nullcontext() if anything else sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        with kernels:
            for iteration in range(2):
                stepper.step(ids_ET, iteration, 2)
        learned_scalars(stepper.model)
        if type(found := stepper.model.hidden(ids_ET[:, :-1])) is not Tensor:
            raise TypeError(f"the model's output is {type(found).__name__}, not a plain tensor")
    except (Exception, SystemExit) as error:
        message = f"a training step fails: {describe(error)}"
        fix = FUSED_FIX if "No available kernel" in message else "correct that line"
        yield violation(message.partition("; fix")[0], fix, module, error)
