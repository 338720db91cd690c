"""Rounding grows within the bounds: a small GPT-2 trained with other kernels, and another split of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from referee.numerics.diagnose.symptoms import GROWTH, LOSS, diagnose, pair_curves
from referee.verdict.loss_files import LossCurve
from tests.referee.numerics.compare.small_models import ours

STEPS = 60


def train(around: Callable[[], AbstractContextManager[Any]], rate: float, splits: int = 1) -> LossCurve:
    """Train on random tokens; the losses and the gradient norms."""
    model: Any = ours()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    draws = torch.Generator().manual_seed(0)
    found = LossCurve("run", {})
    with around():
        for step in range(1, STEPS + 1):
            ids = torch.randint(0, 8, (4, 17), generator=draws)
            parts = [model.loss(part[:, :-1], part[:, 1:]) / splits for part in ids.chunk(splits)]
            for part in parts:
                part.backward()
            found.gradient_norms[step] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            found.losses[step] = float(sum(part.item() for part in parts))
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_correct_kernels_stay_within_half_of_the_bounds(one_thread: None) -> None:
    rate = 1e-2
    golden = train(contextlib.nullcontext, rate)
    others = [
        train(lambda: torch.backends.mkldnn.flags(enabled=False), rate),
        train(lambda: sdpa_kernel(SDPBackend.MATH), rate),
        train(contextlib.nullcontext, rate, splits=2),
    ]
    assert train(contextlib.nullcontext, rate).losses == golden.losses
    unequal = 0
    for other in others:
        pair = pair_curves(golden, other)
        unequal += pair.unequal is not None
        assert all(value.relative <= value.explained / 2 for value in pair.values)
        assert diagnose(pair).symptom in ("rounding", "equal")
    assert unequal
    assert GROWTH[LOSS] == 16
