"""The corpus: faults with the operation or the cause that a comparison must name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.numerics.corpus import changes
from tests.numerics.corpus.changes import Parts
from tests.numerics.corpus.models import IDS, OURS, STEP, TRANSFORMERS, MicroBatches, Optimizer, adamw

CHECKSUMS, VALUES, MODULES = "checksums", "values", "modules"
FORWARD, BACKWARD = "forward", "backward"
ADAMW = adamw()


@dataclass(frozen=True)
class PairSide:
    """One side of a pair. change: of the model. optimizer, steps, after_backward: see models.record.

    around: the context of the run. settings: of the recorder, beside those of the mode.
    """

    change: Callable[[Parts], None] | None = None
    step: Callable[[nn.Module], Any] = STEP
    optimizer: Optimizer | None = None
    steps: int = 1
    after_backward: Callable[[nn.Module], None] | None = None
    seed: int = 0
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    other_process: bool = False


@dataclass(frozen=True)
class PlantedFault:
    """expected: the part of the model that the comparison should report (tests.numerics.corpus.models.PATHS).

    causes: allowed causes where it is not empty. groups: the kind of parameters to be named. named: the part is in the
    name of the first divergence, which is between modules. case: section of the guide with such a case.
    hidden: modes that record the same numbers on both sides.
    """

    name: str
    expected: str
    target: PairSide
    golden: PairSide = field(default_factory=PairSide)
    direction: str = FORWARD
    causes: tuple[str, ...] = ()
    groups: str = ""
    verdict: str = "diverges"
    kinds: tuple[str, ...] = (OURS, TRANSFORMERS)
    case: str = ""
    named: bool = False
    hidden: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """Return the expected answer in words."""
        return ", ".join(filter(None, (self.expected, " or ".join(self.causes), self.groups)))


def _in_model() -> Iterator[PlantedFault]:
    """Faults of a module's computation."""

    def fault(name: str, part: str, change: Callable[[Parts], None], **options: Any) -> PlantedFault:
        return PlantedFault(name, part, PairSide(change), **options)

    yield fault("other GELU", "gelu", changes.other_gelu, case="3.2.1.2")
    yield fault("wrong epsilon", "norm", lambda parts: setattr(parts["norm"], "eps", 1e-6))
    yield fault("residual after the norm", "block", changes.residual_after_norm, case="3.1.3")
    yield fault("missing scale", "attention", changes.attention(changes.unscaled))
    yield fault("swapped q and k", "attention", changes.attention(changes.swapped))
    yield fault("no attention mask", "attention", changes.attention(changes.unmasked))
    yield fault(
        "attention mask of the wrong length",
        "attention",
        changes.attention(changes.longer_mask),
        case="3.2.1.1",
    )
    yield fault("one layer in bfloat16", "fc", lambda parts: changes.in_bf16(parts["fc"]))
    yield fault("dropout left on", "dropout", changes.dropout)
    yield fault("NaN in a layer", "mlp", lambda parts: changes.with_nan(parts["mlp"]))
    yield fault("one flipped bit of a result", "fc", lambda parts: changes.flip_bit(parts["fc"]))
    yield fault("overwritten memory, 2048 elements", "block", changes.overwrite, named=True, case="3.2.2.1")
    yield fault("positions shifted by one", "model", changes.shift_positions, named=True)


def _in_weights() -> Iterator[PlantedFault]:
    """Faults of the weights that a module computes with."""
    for name, part, change in (
        ("one corrupted weight", "fc", changes.corrupt),
        ("stale weight pointer", "out", changes.stale),
        ("truncated weight shard", "fc", changes.truncate),
        ("transposed weight", "out", changes.transpose),
        ("lost bias", "fc", changes.lose_bias),
    ):
        yield PlantedFault(name, part, PairSide(lambda parts, part=part, change=change: change(parts[part])))  # type: ignore[misc]
    yield PlantedFault("other seed of the weights", "", PairSide(seed=1), causes=("parameter",))
    yield PlantedFault("two layers exchanged", "first qkv", PairSide(changes.exchange_layers))


def _in_backward() -> Iterator[PlantedFault]:
    """Faults of gradients."""
    yield PlantedFault(
        "wrong backward of a kernel",
        "gelu",
        PairSide(changes.custom_gelu(changes.WrongGradient)),
        PairSide(changes.custom_gelu(changes.RightGradient)),
        BACKWARD,
    )
    yield PlantedFault(
        "embedding gradient in bfloat16", "tokens", PairSide(changes.coarse_embedding),
        PairSide(changes.own_embedding), BACKWARD, case="3.2.1.3",
    )  # fmt: skip
    yield PlantedFault(
        "embedding not tied", "head", PairSide(changes.untie), direction=BACKWARD, kinds=(TRANSFORMERS,)
    )
    yield PlantedFault(
        "other parallel wrapper: gradients reduced in bfloat16",
        "",
        PairSide(changes.reduce_in_bf16),
        direction=BACKWARD,
        causes=("reduction",),
        case="3.1.1",
    )
    whole = MicroBatches(scale=1.0)
    yield PlantedFault(
        "gradient not averaged", "", PairSide(step=whole), direction="", causes=("gradient", "settings")
    )
    yield PlantedFault(
        "overflow of the loss scale",
        "",
        PairSide(step=MicroBatches(scale=3e38)),
        direction="",
        causes=("gradient", "settings"),
    )
    yield PlantedFault(
        "dropped micro-batch",
        "",
        PairSide(step=MicroBatches(IDS[:2], scale=0.125)),
        PairSide(step=MicroBatches(parts=2)),
        direction="",
        causes=("missing",),
    )


def _in_data() -> Iterator[PlantedFault]:
    """Faults of what the model is given."""
    tails = IDS.clone()
    tails[:, -5:] = 0
    order = torch.randperm(199, generator=torch.Generator().manual_seed(3))
    hidden = (MODULES,)  # max, min, mean and norm are the same in any order
    for name, batch, case in (
        ("data shifted by one token", dataclasses.replace(STEP, ids=IDS.roll(1, 1)), ""),
        ("token tails (padding)", dataclasses.replace(STEP, ids=tails), "3.1.2"),
        ("other tokenizer", dataclasses.replace(STEP, ids=order[IDS]), ""),
    ):
        yield PlantedFault(name, "", PairSide(step=batch), causes=("data",), case=case)
    flipped = dataclasses.replace(STEP, ids=IDS.flip(0))
    yield PlantedFault(
        "other order of sequences", "", PairSide(step=flipped), causes=("data",), hidden=hidden
    )
    yield PlantedFault(
        "targets shifted by two",
        "",
        PairSide(step=MicroBatches(shift=2)),
        direction="",
        causes=("data", "gradient"),
    )


def _over_steps() -> Iterator[PlantedFault]:
    """Faults that a second or third step shows."""

    def fault(
        name: str, groups: str, after: Callable[[nn.Module], None] | None = None, **wrong: Any
    ) -> PlantedFault:
        return PlantedFault(
            name,
            "",
            PairSide(optimizer=adamw(**wrong), steps=3, after_backward=after),
            PairSide(optimizer=ADAMW, steps=3),
            causes=("optimizer",),
            groups=groups,
        )

    yield fault("learning rate", "", rate=1.1e-3)
    yield fault("beta2", "", beta2=0.999)
    yield fault("decay on norms", "norms", decay_norms=True)
    yield fault("weight decay", "embeddings, matrices", decay=0.2)
    yield fault("gradient clipping", "", changes.clip)
    yield PlantedFault(
        "faulty device: one wrong product in the third step",
        "fc",
        PairSide(lambda parts: changes.wrong_now_and_then(parts["fc"], 2), optimizer=ADAMW, steps=3),
        PairSide(optimizer=ADAMW, steps=3),
        case="3.2.2.3",
    )
    cached = changes.cached_attention
    yield PlantedFault(
        "KV cache not cleared",
        "first attention",
        PairSide(lambda parts: cached(parts, clear=False), step=changes.twice),
        PairSide(lambda parts: cached(parts, clear=True), step=changes.twice),
    )
    yield PlantedFault(
        "non-deterministic scatter",
        "fc",
        PairSide(lambda parts: changes.scatter(parts["fc"], 1)),
        PairSide(lambda parts: changes.scatter(parts["fc"], 2)),
        verdict="rounding",
        case="3.2.2.2",
    )


FAULTS: tuple[PlantedFault, ...] = (
    *_in_model(),
    *_in_weights(),
    *_in_backward(),
    *_in_data(),
    *_over_steps(),
)
