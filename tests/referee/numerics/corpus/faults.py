"""Faults of two GPT-2 models, with the module and the class of evidence that a comparison must name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.referee.numerics.corpus import changes
from tests.referee.numerics.corpus.cases import MODULES, Case, Side
from tests.referee.numerics.corpus.changes import Parts
from tests.referee.numerics.corpus.models import IDS, STEP, TRANSFORMERS, MicroBatches, adamw

BACKWARD = "backward"
ADAMW = adamw()


def _in_model() -> Iterator[Case]:
    """Faults of a module's computation."""

    def fault(name: str, part: str, change: Callable[[Parts], None], **options: Any) -> Case:
        return Case(name, part, Side(change), **options)

    yield fault("other GELU", "gelu", changes.other_gelu, guide="3.2.1.2")
    yield fault(
        "wrong epsilon", "norm", lambda parts: setattr(parts["norm"], "eps", 1e-6), evidence="setting"
    )
    yield fault("residual after the norm", "block", changes.residual_after_norm, guide="3.1.3")
    yield fault("missing scale", "attention", changes.attention(changes.unscaled), evidence="setting|changed")
    yield fault("swapped q and k", "attention", changes.attention(changes.swapped), evidence="changed")
    yield fault(
        "no attention mask", "attention", changes.attention(changes.unmasked), evidence="setting|changed"
    )
    longer = changes.attention(changes.longer_mask)
    yield fault("attention mask of the wrong length", "attention", longer, guide="3.2.1.1")
    yield fault(
        "one layer in bfloat16",
        "fc",
        lambda parts: changes.in_bf16(parts["fc"]),
        evidence="setting|parameter",
    )
    yield fault("dropout left on", "dropout", changes.dropout, evidence="setting")
    yield fault("NaN in a layer", "mlp", lambda parts: changes.with_nan(parts["mlp"]), evidence="computed")
    yield fault(
        "one flipped bit of a result", "fc", lambda parts: changes.flip_bit(parts["fc"]), evidence="computed"
    )
    yield fault("overwritten memory, 2048 elements", "block|transformer", changes.overwrite, guide="3.2.2.1")
    yield fault("positions shifted by one", "positions|transformer", changes.shift_positions)


def _in_weights() -> Iterator[Case]:
    """Faults of the weights that a module computes with."""
    for name, part, change in (
        ("one corrupted weight", "fc", changes.corrupt),
        ("stale weight pointer", "out", changes.stale),
        ("truncated weight shard", "fc", changes.truncate),
        ("transposed weight", "out", changes.transpose),
        ("lost bias", "fc", changes.lose_bias),
    ):
        side = Side(lambda parts, part=part, change=change: change(parts[part]))  # type: ignore[misc]
        yield Case(name, part, side, evidence="parameter")
    yield Case("other seed of the weights", "", Side(seed=1), evidence="parameter")
    yield Case("two layers exchanged", "first qkv", Side(changes.exchange_layers))


def _in_backward() -> Iterator[Case]:
    """Faults of gradients."""
    wrong, right = (changes.custom_gelu(one) for one in (changes.WrongGradient, changes.RightGradient))
    yield Case("wrong backward of a kernel", "gelu", Side(wrong), Side(right), direction=BACKWARD)
    coarse, fine = Side(changes.coarse_embedding), Side(changes.custom_embedding)
    yield Case(
        "embedding gradient in bfloat16", "tokens|head", coarse, fine, direction=BACKWARD, guide="3.2.1.3"
    )
    untied = Side(changes.untie)
    yield Case("embedding not tied", "head", untied, direction=BACKWARD, kinds=(TRANSFORMERS,))
    yield Case(
        "other parallel wrapper: gradients reduced in bfloat16",
        target=Side(changes.reduce_in_bf16),
        evidence="update",
        direction=BACKWARD,
        guide="3.1.1",
    )
    for name, scale in (("gradient not averaged", 1.0), ("overflow of the loss scale", 3e38)):
        step = MicroBatches(scale=scale)
        yield Case(name, target=Side(step=step), evidence="data|setting", direction="")
    half = Side(step=MicroBatches(IDS[:2], scale=0.125))
    both = Side(step=MicroBatches(parts=2))
    yield Case("dropped micro-batch", "", half, both, evidence="one side", direction="")


def _in_data() -> Iterator[Case]:
    """Faults of what the model is given."""
    tails = IDS.clone()
    tails[:, -5:] = 0
    order = torch.randperm(199, generator=torch.Generator().manual_seed(3))
    hidden = (MODULES,)  # max, min, mean and norm are the same in any order
    for name, ids, options in (
        ("data shifted by one token", IDS.roll(1, 1), {}),
        ("token tails (padding)", tails, {"guide": "3.1.2"}),
        ("other tokenizer", order[IDS], {}),
        ("other order of sequences", IDS.flip(0), {"hidden": hidden}),
    ):
        step = dataclasses.replace(STEP, ids=ids)
        yield Case(name, target=Side(step=step), evidence="data", **options)  # type: ignore[arg-type]
    later = Side(step=MicroBatches(shift=2))
    yield Case("targets shifted by two", target=later, evidence="data", direction="")


def _over_steps() -> Iterator[Case]:
    """Faults that a second or third step shows."""
    golden = Side(optimizer=ADAMW, steps=3)

    def fault(
        name: str, modules: str, after: Callable[[nn.Module], None] | None = None, **wrong: Any
    ) -> Case:
        target = dataclasses.replace(golden, optimizer=adamw(**wrong), after_backward=after)
        return Case(name, modules, target, golden, evidence="update")

    yield fault("learning rate", "tokens", rate=1.1e-3)
    yield fault("beta2", "tokens", beta2=0.999)
    yield fault("decay on norms", "first norm", decay_norms=True)
    yield fault("weight decay", "tokens", decay=0.2)
    yield fault("gradient clipping", "tokens", changes.clip)
    once = dataclasses.replace(golden, change=lambda parts: changes.wrong_now_and_then(parts["fc"], 2))
    yield Case("faulty device: one wrong product in the third step", "fc", once, golden, guide="3.2.2.3")
    kept, cleared = (
        Side(lambda parts, clear=clear: changes.cached_attention(parts, clear), step=changes.twice)  # type: ignore[misc]
        for clear in (False, True)
    )
    yield Case("KV cache not cleared", "first attention", kept, cleared)
    one, two = (
        Side(lambda parts, seed=seed: changes.scatter(parts["fc"], seed))  # type: ignore[misc]
        for seed in (1, 2)
    )
    yield Case("non-deterministic scatter", "", one, two, verdict="rounding", guide="3.2.2.2")


FAULTS = (*_in_model(), *_in_weights(), *_in_backward(), *_in_data(), *_over_steps())
