"""Small GPT-2 models, of ours and of transformers, and records of their steps."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.initial_weights import initialise
from gpt2.transformer import GPT2
from referee.numerics import Recorder, RecorderConfig

IDS = torch.randint(199, (4, 33), generator=torch.Generator().manual_seed(0))
OURS, TRANSFORMERS = "ours", "transformers"
# Names of modules in both models. "gelu" and "attention" are the modules that compute them.
PATHS: Mapping[str, tuple[str, str]] = {
    "model": ("", ""),
    "tokens": ("token", "transformer.wte"),
    "positions": ("position", "transformer.wpe"),
    "first block": ("blocks.0", "transformer.h.0"),
    "first norm": ("blocks.0.norm1", "transformer.h.0.ln_1"),
    "first attention": ("blocks.0.attention", "transformer.h.0.attn"),
    "first qkv": ("blocks.0.attention.qkv", "transformer.h.0.attn.c_attn"),
    "block": ("blocks.1", "transformer.h.1"),
    "block norm": ("blocks.1.norm1", "transformer.h.1.ln_1"),
    "norm": ("blocks.1.norm2", "transformer.h.1.ln_2"),
    "attention": ("blocks.1.attention", "transformer.h.1.attn"),
    "out": ("blocks.1.attention.proj", "transformer.h.1.attn.c_proj"),
    "mlp": ("blocks.1.mlp", "transformer.h.1.mlp"),
    "dropout": ("blocks.1.mlp", "transformer.h.1.mlp.dropout"),
    "gelu": ("blocks.1.mlp", "transformer.h.1.mlp.act"),
    "fc": ("blocks.1.mlp.fc", "transformer.h.1.mlp.c_fc"),
    "contract": ("blocks.1.mlp.proj", "transformer.h.1.mlp.c_proj"),
    "last norm": ("norm", "transformer.ln_f"),
    "head": ("", "lm_head"),
}


def path_of(part: str, kind: str) -> str:
    """Return the dotted path of a part of PATHS, or the path itself where it is none."""
    return PATHS[part][kind == TRANSFORMERS] if part in PATHS else part


def ours(seed: int = 0) -> nn.Module:
    model = GPT2(layers=2, heads=4, width=64, block_size=32, vocabulary=199, padded_vocabulary=256)
    initialise(model, seed)
    return model


def transformers_gpt2(seed: int = 0) -> nn.Module:
    import transformers

    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 32, "vocab_size": 199}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(
        **sizes, **dropout, **tokens, use_cache=False, attn_implementation="sdpa"
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


MAKERS: Mapping[str, Callable[..., nn.Module]] = {OURS: ours, TRANSFORMERS: transformers_gpt2}


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    if isinstance(model, GPT2):
        return model.loss(inputs, targets)
    logits: Tensor = model(inputs).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """A step: forward and backward of the micro-batches of `ids`. scale: of the loss. shift: of the targets."""

    ids: Tensor = IDS
    parts: int = 1
    scale: float = 0.25
    shift: int = 1
    pairs: list[tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        targets = self.ids.roll(-self.shift, 1)
        both = zip(self.ids[:, :-1].chunk(self.parts), targets[:, :-1].chunk(self.parts), strict=True)
        object.__setattr__(self, "pairs", list(both))

    def __call__(self, model: nn.Module) -> None:
        for inputs, targets in self.pairs:
            torch.autograd.backward(loss_of(model, inputs, targets) * (self.scale / self.parts))

    def of_step(self, step: int) -> MicroBatches:
        """Return the step on another batch."""
        return MicroBatches((self.ids + 7 * step) % 199, self.parts, self.scale, self.shift)


STEP = MicroBatches()
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(
    rate: float = 1e-3, beta2: float = 0.95, decay_norms: bool = False, decay: float = 0.1, **kernel: bool
) -> Optimizer:
    """Return what makes AdamW for a model: weight decay on matrices alone, except with decay_norms."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        parameters = [value for value in model.parameters() if value.requires_grad]
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": decay},
            {"params": vectors, "weight_decay": decay if decay_norms else 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, beta2), **kernel)

    return make


def record(
    folder: Path,
    model: nn.Module,
    run: Callable[[nn.Module], Any] = STEP,
    around: AbstractContextManager[Any] | None = None,
    optimizer: Optimizer | None = None,
    steps: int = 1,
    after_backward: Callable[[nn.Module], None] | None = None,
    **settings: Any,
) -> Path:
    """Record steps of the model, of MicroBatches each on another batch. Returns the folder of the dump.

    after_backward: what the training loop does to the gradients before the optimizer's step.
    """
    place = Path(tempfile.mkdtemp(prefix="record", dir=folder))
    recorder = Recorder(RecorderConfig(dump_path=str(place), **settings))
    update = optimizer(model) if optimizer else None
    with around or contextlib.nullcontext():
        for step in range(steps):
            recorder.start(model)
            (run.of_step(step) if step and isinstance(run, MicroBatches) else run)(model)
            recorder.stop()
            if after_backward:
                after_backward(model)
            if update:
                update.step()
                update.zero_grad()
            recorder.step()
    return place
