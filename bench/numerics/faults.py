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

from bench.numerics import changes
from bench.numerics.changes import Parts
from bench.numerics.models import IDS, OURS, STEP, TRANSFORMERS, Batch, Optimizer, adamw

CHECKSUMS, VALUES, MODULES = "checksums", "values", "modules"
FORWARD, BACKWARD = "forward", "backward"
ADAMW = adamw()


@dataclass(frozen=True)
class Run:
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
class Fault:
    """expected: the part of the model that the comparison should report (bench.numerics.models.PATHS).

    causes: allowed causes where it is not empty. groups: the kind of parameters to be named. named: the part is in the
    name of the first divergence, which is between modules. case: section of the guide with such a case.
    hidden: modes that record the same numbers on both sides.
    """

    name: str
    expected: str
    target: Run
    golden: Run = field(default_factory=Run)
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


def _in_model() -> Iterator[Fault]:
    """Faults of a module's computation."""

    def fault(name: str, part: str, change: Callable[[Parts], None], **options: Any) -> Fault:
        return Fault(name, part, Run(change), **options)

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


def _in_weights() -> Iterator[Fault]:
    """Faults of the weights that a module computes with."""
    for name, part, change in (
        ("one corrupted weight", "fc", changes.corrupt),
        ("stale weight pointer", "out", changes.stale),
        ("truncated weight shard", "fc", changes.truncate),
        ("transposed weight", "out", changes.transpose),
        ("lost bias", "fc", changes.lose_bias),
    ):
        yield Fault(name, part, Run(lambda parts, part=part, change=change: change(parts[part])))  # type: ignore[misc]
    yield Fault("other seed of the weights", "", Run(seed=1), causes=("parameter",))
    yield Fault("two layers exchanged", "first qkv", Run(changes.exchange_layers))


def _in_backward() -> Iterator[Fault]:
    """Faults of gradients."""
    yield Fault(
        "wrong backward of a kernel",
        "gelu",
        Run(changes.custom_gelu(changes.WrongGradient)),
        Run(changes.custom_gelu(changes.RightGradient)),
        BACKWARD,
    )
    yield Fault(
        "embedding gradient in bfloat16", "tokens", Run(changes.coarse_embedding),
        Run(changes.own_embedding), BACKWARD, case="3.2.1.3",
    )  # fmt: skip
    yield Fault("embedding not tied", "head", Run(changes.untie), direction=BACKWARD, kinds=(TRANSFORMERS,))
    yield Fault(
        "other parallel wrapper: gradients reduced in bfloat16",
        "",
        Run(changes.reduce_in_bf16),
        direction=BACKWARD,
        causes=("reduction",),
        case="3.1.1",
    )
    whole = Batch(scale=1.0)
    yield Fault("gradient not averaged", "", Run(step=whole), direction="", causes=("gradient", "settings"))
    yield Fault(
        "overflow of the loss scale",
        "",
        Run(step=Batch(scale=3e38)),
        direction="",
        causes=("gradient", "settings"),
    )
    yield Fault(
        "dropped micro-batch",
        "",
        Run(step=Batch(IDS[:2], scale=0.125)),
        Run(step=Batch(parts=2)),
        direction="",
        causes=("missing",),
    )


def _in_data() -> Iterator[Fault]:
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
        yield Fault(name, "", Run(step=batch), causes=("data",), case=case)
    flipped = dataclasses.replace(STEP, ids=IDS.flip(0))
    yield Fault("other order of sequences", "", Run(step=flipped), causes=("data",), hidden=hidden)
    yield Fault(
        "targets shifted by two",
        "",
        Run(step=Batch(shift=2)),
        direction="",
        causes=("data", "gradient"),
    )


def _over_steps() -> Iterator[Fault]:
    """Faults that a second or third step shows."""

    def fault(
        name: str, groups: str, after: Callable[[nn.Module], None] | None = None, **wrong: Any
    ) -> Fault:
        return Fault(
            name,
            "",
            Run(optimizer=adamw(**wrong), steps=3, after_backward=after),
            Run(optimizer=ADAMW, steps=3),
            causes=("optimizer",),
            groups=groups,
        )

    yield fault("learning rate", "", rate=1.1e-3)
    yield fault("beta2", "", beta2=0.999)
    yield fault("decay on norms", "norms", decay_norms=True)
    yield fault("weight decay", "embeddings, matrices", decay=0.2)
    yield fault("gradient clipping", "", changes.clip)
    yield Fault(
        "faulty device: one wrong product in the third step",
        "fc",
        Run(lambda parts: changes.wrong_now_and_then(parts["fc"], 2), optimizer=ADAMW, steps=3),
        Run(optimizer=ADAMW, steps=3),
        case="3.2.2.3",
    )
    cached = changes.cached_attention
    yield Fault(
        "KV cache not cleared",
        "first attention",
        Run(lambda parts: cached(parts, clear=False), step=changes.twice),
        Run(lambda parts: cached(parts, clear=True), step=changes.twice),
    )
    yield Fault(
        "non-deterministic scatter",
        "fc",
        Run(lambda parts: changes.scatter(parts["fc"], 1)),
        Run(lambda parts: changes.scatter(parts["fc"], 2)),
        verdict="rounding",
        case="3.2.2.2",
    )


FAULTS: tuple[Fault, ...] = (
    *_in_model(),
    *_in_weights(),
    *_in_backward(),
    *_in_data(),
    *_over_steps(),
)
