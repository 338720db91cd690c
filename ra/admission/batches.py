"""Check that a sequence of a batch depends on no other one."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.transformer import GPT2
from ra.admission.causality import CAUSAL, MODES, run_model
from ra.admission.probe import (
    BFLOAT16_ROUNDING,
    Probe,
    at_steps,
    difference,
    inputs,
    restored_generators,
    row_rounding,
    run,
    run_autocast,
    seed_generators,
    shape_rounding,
    working_dtype,
)
from ra.admission.repeatability import MODE, differ, in_model, stochastic, whole_model
from ra.admission.results import OUTSIDE, Violation, describe, violation
from ra.global_state import GlobalState
from runtime.run_record import Admission, ModelFault

BATCH = "batch"
OTHERS = "the other sequences of the batch changed"
BATCH_FIX = "use no mean, norm or index over dimension 0, the batch"


def batch(probe: Probe) -> Iterator[Violation]:
    """A sequence's output depends on no other sequence, nor on the batch's order, size or split."""
    dtype, tokens = probe.dtypes[0], min(33, probe.ordinary)
    x_BTC = inputs(4, tokens, probe.shape.width, dtype)
    for layer, module in probe.parts("perturbed", dtype):
        working = working_dtype(module, probe.shape.width, dtype)
        exact, loose = row_rounding(working, tokens), shape_rounding(working, tokens, probe.shape.width)
        for training in (True, False):
            passes = _batches(functools.partial(run, module, training=training), x_BTC)
            wrong = None
            for what, expected, actual in passes:
                seen, same_shape = difference(expected, actual), what == OTHERS
                if seen[0] > (exact if same_shape else loose):
                    wrong = differ(layer, module, what, seen, MODES[training], BATCH_FIX)
                if wrong or (training and stochastic(module)):  # draws depend on the order and the shape
                    break
            if wrong:
                yield wrong
                break
        else:
            yield from _batch_gradient(layer, module, x_BTC, exact)
    yield from _later_batches(probe)
    model, ids_BT = whole_model(probe)
    whole = run_model(model, ids_BT, False)
    found_alone = difference(whole[:1], run_model(model, ids_BT[:1], False))
    yield from in_model(probe, model, found_alone, "a sequence alone and in a batch", BATCH_FIX)


def _batches(function: Callable[[Tensor], Tensor], x_BTC: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What differs between two passes, and their outputs for the same sequences. The first has one shape."""
    whole = function(x_BTC)
    yield OTHERS, whole[:1], function(_with_others(x_BTC))[:1]
    order = torch.tensor([2, 0, 3, 1])
    yield "the batch in another order", whole[order], function(x_BTC[order])
    for rows in (1, 2):
        parts = [function(part) for part in x_BTC.split(rows)]
        yield f"micro-batches of {rows}", whole, torch.cat(parts)
    large_BTC = inputs(64, min(9, x_BTC.shape[1]), x_BTC.shape[2], x_BTC.dtype, seed=6)
    large = function(large_BTC)
    for rows in (1, 3, 6, 16, 33):
        yield f"{rows} and 64 sequences", large[:rows], function(large_BTC[:rows])


def _with_others(x_BTC: Tensor) -> Tensor:
    """The first sequence beside other ones."""
    B, T, C = x_BTC.shape
    return torch.cat([x_BTC[:1], 3 * inputs(B - 1, T, C, x_BTC.dtype, seed=5)])


def _later_batches(probe: Probe) -> Iterator[Violation]:
    """The other sequences at later steps, and under the study's autocast."""
    dtype = probe.dtypes[-1]
    x_BTC = inputs(4, min(33, probe.ordinary), probe.shape.width, dtype)
    for layer, module in probe.parts("perturbed", dtype, edges=True):
        allowed = row_rounding(working_dtype(module, probe.shape.width, dtype), x_BTC.shape[1])
        cases: list[tuple[str, nn.Module, Callable[..., Any], float]]
        cases = [(when, later, run, allowed) for when, later in at_steps(module)]
        if probe.autocast and dtype == torch.float32:
            cases.append((", bfloat16 autocast", module, run_autocast, BFLOAT16_ROUNDING))
        for when, one, pass_of, most in cases:
            for training in (True, False):
                whole, changed = (pass_of(one, x, training)[:1] for x in (x_BTC, _with_others(x_BTC)))
                found = difference(whole, changed)
                if found[0] > most:
                    yield differ(layer, module, OTHERS, found, MODES[training] + when, BATCH_FIX)
                    return


def _batch_gradient(layer: int, module: nn.Module, x_BTC: Tensor, allowed: float) -> Iterator[Violation]:
    """The gradient of one sequence's output with respect to another sequence is zero."""
    leaf = x_BTC.clone().requires_grad_()
    y_BTC = run(module, leaf, training=True, grad=True)
    if not y_BTC.requires_grad:
        return
    (gradient,) = torch.autograd.grad(
        (y_BTC * inputs(*x_BTC.shape, x_BTC.dtype, seed=9))[:1].sum(),
        leaf,
        allow_unused=True,
        materialize_grads=True,
    )
    size = float(gradient[1:].abs().max() / gradient.abs().max().clamp_min(1e-30))
    if size > allowed:
        yield violation(
            f"backward: the gradient of sequence 0 with respect to the others is {size:.2g} of the largest gradient",
            "correct the backward of the custom function",
            module,
            layer=layer,
            size=size,
        )


@torch.no_grad()
def examine_trained(model: GPT2, ids_BT: Tensor, before: GlobalState | None = None) -> Admission:
    """Examine the model on validation windows ids_BT, in the autocast of the caller. Leaves it in evaluation mode.

    before: the state of the process before training.
    """
    began = time.perf_counter()
    faults: list[ModelFault] = []
    if before and (changed := before.changed()):
        faults.append(ModelFault(OUTSIDE, f"{changed} changed during training"))
    with restored_generators():
        try:
            faults += _faults(model, ids_BT)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            faults.append(ModelFault("shape", describe(error)))
        finally:
            model.eval()
    return Admission(tuple(faults), round(time.perf_counter() - began, 3))


def _hidden(model: GPT2, ids_BT: Tensor, training: bool) -> Tensor:
    model.train(training)
    seed_generators()
    return model.hidden(ids_BT).float()


def _faults(model: GPT2, ids_BT: Tensor) -> Iterator[ModelFault]:
    """Yield the faults of a trained model."""
    tokens, width = ids_BT.shape[1], model.token.weight.shape[1]
    assert isinstance(width, int)
    narrow = torch.is_autocast_enabled(ids_BT.device.type)
    exact = BFLOAT16_ROUNDING if narrow else row_rounding(torch.float32, tokens)
    loose = BFLOAT16_ROUNDING if narrow else shape_rounding(torch.float32, tokens, width)
    random = model.dropout > 0 or any(stochastic(module) for module in model.modules())
    outputs = {training: _hidden(model, ids_BT, training) for training in (True, False)}
    leaks = []
    for training, cut in ((mode, cut) for mode in MODES for cut in (tokens - 1, tokens // 2)):
        if cut < 1:
            continue
        changed = ids_BT.clone()
        changed[:, cut:] = (changed[:, cut:] + 1) % model.vocabulary
        size, position = difference(outputs[training][:, :cut], _hidden(model, changed, training)[:, :cut])
        if size > exact:
            leaks.append((size, position, cut, MODES[training]))
    for size, position, cut, mode in leaks[:1]:
        yield ModelFault(
            CAUSAL,
            f"the hidden state at position {position} changes by {size:.2g} of the largest when only tokens from "
            f"position {cut} on change ({mode})",
            size,
        )
    found = [(MODE, "training and evaluation differ", outputs[True])] if not random else []
    if len(ids_BT) > 1:
        reordered = _hidden(model, ids_BT.flip(0), False).flip(0)
        found.append((BATCH, "the batch in another order gives other outputs: they differ", reordered))
        others = torch.cat([ids_BT[:1], (ids_BT[1:] + 1) % model.vocabulary])
        first = _hidden(model, others, False)[:1]
        found.append((BATCH, "a sequence in another batch gives other outputs: they differ", first))
    for check, what, other in found:
        size, position = difference(outputs[False][: len(other)], other)
        if size > loose:
            yield ModelFault(
                check, f"{what} by {size:.2g} of the largest hidden state at position {position}", size
            )
            if check == BATCH:
                return
