"""Layers of torch.nn that are replayed in float64, where modules alone were recorded with their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from referee.numerics.compare.compared_rows import replayed_error
from referee.numerics.record.read_record import read_record
from referee.numerics.rounding.within_rounding import BOUND
from tests.referee.numerics.compare.small_models import record

LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Linear(64, 32), (8, 64)),
    (lambda: nn.Bilinear(8, 8, 4), (8, 8)),
    (lambda: nn.Conv1d(8, 4, 3, padding=1), (2, 8, 16)),
    (lambda: nn.Conv2d(3, 4, 3, stride=2, groups=1), (2, 3, 8, 8)),
    (lambda: nn.LayerNorm(64), (8, 64)),
    (lambda: nn.RMSNorm(64), (8, 64)),
    (lambda: nn.GroupNorm(4, 8), (2, 8, 16)),
    (lambda: nn.BatchNorm1d(64), (8, 64)),
    (lambda: nn.GELU("tanh"), (8, 64)),
    (lambda: nn.Softmax(-1), (8, 64)),
    (lambda: nn.MaxPool1d(2), (2, 8, 16)),
]


@pytest.mark.parametrize(("make", "shape"), LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_within_rounding_of_its_replay(
    make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(shape).to(dtype), make().to(dtype)
    inputs = (x, x.flip(0)) if isinstance(layer, nn.Bilinear) else (x,)
    folder = record(tmp_path, layer, lambda model: model(*inputs), level="L0", task="tensor")
    (call,) = read_record(folder / "rank0").calls.values()
    assert replayed_error(call, call) < 4


def test_another_setting_is_beyond_rounding(tmp_path: Path) -> None:
    folder = record(
        tmp_path, nn.BatchNorm1d(8), lambda model: model(torch.randn(16, 8)), level="L0", task="tensor"
    )
    (call,) = read_record(folder / "rank0").calls.values()
    assert replayed_error(replace(call, settings=call.settings | {"eps": 1e-3}), call) > BOUND
