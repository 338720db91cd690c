"""Small models whose steps are recorded, and a comparison of two such steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.model.init import initialise
from gpt2.model.transformer import GPT2
from numerics import Recorder, RecorderConfig
from numerics.compare.run import Comparison, compare_records

IDS = torch.randint(199, (4, 33), generator=torch.Generator().manual_seed(0))
STATISTICS = {"level": "mix", "summary_mode": "md5"}
TENSORS = {"level": "mix", "task": "tensor"}
MODULES = {"level": "L0"}
number = itertools.count()


def ours(width: int = 64, dropout: float = 0.0) -> nn.Module:
    model = GPT2(
        layers=2, heads=4, width=width, block_size=32, vocabulary=199, padded_vocabulary=256, dropout=dropout
    )
    initialise(model, 0)
    return model


def transformers_gpt2() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=4,
        n_embd=64,
        n_positions=32,
        vocab_size=199,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="sdpa",
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def step(model: nn.Module, ids: Tensor = IDS, scale: float = 0.25) -> None:
    if isinstance(model, GPT2):
        loss = model.loss(ids[:, :-1], ids[:, 1:])
    else:
        loss = model(ids[:, :-1], labels=ids[:, :-1]).loss
    (loss * scale if scale != 1 else loss).backward()


def record(
    folder: Path,
    model: nn.Module,
    run: Callable[[nn.Module], Any] = step,
    around: AbstractContextManager[Any] | None = None,
    **settings: Any,
) -> Path:
    """Record a step of the model. Returns the folder of the step."""
    place = folder / f"record{next(number)}"
    recorder = Recorder(RecorderConfig(dump_path=str(place), **settings))
    with around or contextlib.nullcontext():
        recorder.start(model)
        run(model)
        recorder.stop()
        recorder.step()
    return place / "step0"


def compared(target: Path, golden: Path, **options: Any) -> Comparison:
    return compare_records(target, golden, **options)


def growth(comparison: Comparison) -> float:
    """Return the largest error relative to what explains it."""
    return max((size for one in comparison.steps for size, _ in one.judgement.growths), default=0.0)
