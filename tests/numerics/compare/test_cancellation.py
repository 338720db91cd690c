"""Gradients that are much smaller than the terms of their sums: rounding is relative to the terms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from numerics import Recorder, RecorderConfig
from numerics.compare.run import Comparison, compare_records

MODES: dict[str, dict[str, Any]] = {
    "modules": {"level": "L0"},
    "checksums": {"level": "mix", "summary_mode": "md5"},
    "values": {"level": "mix", "task": "tensor"},
    "functions": {"level": "L1", "task": "tensor"},
}


class WrittenNorm(nn.Module):
    """RMSNorm of functions: the gradient of x is the sum of those of its two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class WrongSum(torch.autograd.Function):
    """The identity, with a gradient that is wrong by 2 %."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 1.02 * gradient


class WrongNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(WrongSum.apply(x))


class Checkpointed(nn.Module):
    """Layers that end with a LayerNorm, recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(64, 2, 128, 0.0, batch_first=True) for _ in range(2))
        self.first, self.layers = nn.Linear(32, 64), nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).unflatten(0, (8, 16))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def ending(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), norm())


def square(y: Tensor) -> Tensor:
    return y.square().mean()


def record(
    folder: Path,
    build: Callable[[], nn.Module],
    mode: str,
    dtype: torch.dtype = torch.float32,
    kernels: bool = True,
    loss: Callable[[Tensor], Tensor] = square,
) -> Path:
    torch.manual_seed(0)
    model, x = build().to(dtype), torch.randn(128, 32).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    recorder = Recorder(RecorderConfig(dump_path=str(folder), **MODES[mode]))
    with contextlib.nullcontext() if kernels else torch.backends.mkldnn.flags(enabled=False):
        for _ in range(2):
            recorder.start(model)
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
            recorder.stop()
            recorder.step()
    return folder


def compared(folder: Path, build: Callable[[], nn.Module], mode: str, **other: Any) -> Comparison:
    """Compare two clean records of a model whose loss changes neither mean nor norm of the last norm's input."""
    golden = record(folder / "golden", build, mode)
    return compare_records(record(folder / "target", build, mode, **other), golden)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "other", [{"kernels": False}, {"dtype": torch.bfloat16}], ids=["kernels", "bfloat16"]
)
def test_a_loss_that_a_normalisation_cancels_is_no_divergence(
    mode: str, other: dict[str, Any], tmp_path: Path
) -> None:
    norm = WrittenNorm if mode in ("values", "functions") else lambda: nn.LayerNorm(64)
    found = compared(tmp_path, ending(norm), mode, **other)
    assert found.verdict == "rounding", found.first


def test_checkpointed_layers_that_end_with_a_norm_are_no_divergence(tmp_path: Path) -> None:
    for mode in ("modules", "checksums"):
        found = compared(tmp_path / mode, Checkpointed, mode, dtype=torch.bfloat16)
        assert found.verdict == "rounding", found.first


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_gradient_of_a_normalisation_is_named(mode: str, tmp_path: Path) -> None:
    """A loss that the norm does not cancel: its gradient is as large as its terms."""
    aim = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    sides = [
        record(
            tmp_path / name,
            ending(lambda norm=norm: norm(64)),
            mode,
            kernels=kernels,
            loss=lambda y: (y - aim).square().mean(),
        )
        for name, norm, kernels in (("golden", nn.LayerNorm, True), ("target", WrongNorm, False))
    ]
    found = compare_records(sides[1], sides[0]).first
    assert found is not None
    assert found[0].place == "step0/rank0"
    assert found[1].direction == "backward"
    if mode != "functions":
        assert found[1].module == "3"
