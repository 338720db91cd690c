"""Examine a trained model on validation windows: causality, the two modes, the batch."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from gpt2.transformer import GPT2
from ra.admission.batches import BATCH
from ra.admission.causality import CAUSAL, MODES
from ra.admission.probe import (
    BFLOAT16_ROUNDING,
    difference,
    restored_generators,
    row_rounding,
    seed_generators,
    shape_rounding,
)
from ra.admission.repeatability import MODE, stochastic
from ra.admission.results import OUTSIDE
from ra.admission.violation import describe
from ra.global_state import GlobalState
from runtime.run_record import Admission, ModelFault


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
