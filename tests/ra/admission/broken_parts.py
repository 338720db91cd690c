"""Broken norms, MLPs and positions: each class is one fault, and `fails` names the check that must find it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from gpt2.transformer import CausalSelfAttention, FirstValues, LearnedPosition
from ra.hooks import AttentionSpec


class NormOverTime(nn.Module):
    """Divides by the root mean square over all positions."""

    part, fails = "norm", "causal"

    def __init__(self, spec: AttentionSpec, layer: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(spec.width))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean((1, 2), keepdim=True) + 1e-5).sqrt() * self.weight


class NormOverTheBatch(NormOverTime):
    fails = "batch"

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean((0, 2), keepdim=True) + 1e-5).sqrt() * self.weight


class RunningStatistics(NormOverTime):
    """Divides by an average over the calls, as a batch norm does in evaluation."""

    fails = "deterministic"

    def __init__(self, spec: AttentionSpec, layer: int = 0) -> None:
        super().__init__(spec)
        self.register_buffer("mean_square", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean_square = 0.5 * self.mean_square + 0.5 * x.detach().square().mean().to(torch.float32)
        return x / (self.mean_square + 1e-5).sqrt().to(x.dtype) * self.weight


class MLPThatMixesPositions(nn.Module):
    """Adds the mean over all positions to its input."""

    part, fails = "mlp", "causal"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.proj = nn.Linear(spec.width, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(torch.relu(x + x.mean(1, keepdim=True)))
        return y


class DeadMLP(MLPThatMixesPositions):
    """Has a layer that it does not use."""

    fails = "gradients"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.unused = nn.Linear(spec.width, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(torch.relu(x))
        return y


class ShiftedMLP(MLPThatMixesPositions):
    """Sees the next position."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(torch.relu(torch.cat([x[:, 1:], x[:, :1]], 1)))
        return y


class RelativeToTheEnd(nn.Module):
    """Adds sinusoids of t / T, so the embedding of a position depends on the length."""

    part, fails = "position", "length"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.register_buffer("rates", torch.arange(1, spec.width + 1) / 4)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        T = x.shape[1]
        times = torch.arange(start, start + T) / T
        return x + torch.sin(times[:, None] * self.rates).to(x.dtype)


class RotationBackwards(RelativeToTheEnd):
    """Rotates by the distance to the last position: scores of two positions do not change, other outputs do."""

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        return x

    def rotate(self, q: Tensor, k: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        T = q.shape[2]
        scale = 1 + torch.arange(T).flip(0)[:, None].to(q.dtype) / 100
        return q * scale, k


class IgnoresStart(RelativeToTheEnd):
    """Begins at position 0 wherever the input begins."""

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        times = torch.arange(x.shape[1])
        return x + torch.sin(times[:, None] * self.rates).to(x.dtype)


class RotationIgnoresStart(RelativeToTheEnd):
    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        return x

    def rotate(self, q: Tensor, k: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        scale = 1 + torch.arange(q.shape[2])[:, None].to(q.dtype) / 100
        return q * scale, k / scale


class CentredOverTime(RelativeToTheEnd):
    """Subtracts the mean embedding of the sequence."""

    fails: ClassVar[str] = "causal"

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        return x - x.mean(1, keepdim=True)


class LearnedPositionOfTheBatch(LearnedPosition):
    """Derives from GPT-2's position and adds the mean over the batch."""

    part, fails = "position", "batch"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec.block_size, spec.width)

    def forward(self, x_BTC: Tensor, start: int = 0) -> Tensor:
        return super().forward(x_BTC, start) + x_BTC.mean(0, keepdim=True)


class UnrotatedAttention(CausalSelfAttention):
    """Projects its input itself and forgets the rotation."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec.width, spec.heads)

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, C = x_BTC.shape
        q, k, v = self.qkv(x_BTC).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        return q, k, v


class FirstValuesOfTheBatch(CausalSelfAttention):
    """Adds the mean of the first layer's values over the batch."""

    part, fails = "attention", "batch"
    mixes_first_values = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec.width, spec.heads)

    def mixed(self, first_BHTD: Tensor) -> Tensor:
        return first_BHTD.mean(0, keepdim=True)

    def forward(self, x_BTC: Tensor, first: FirstValues | None = None) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = self.project(x_BTC)
        if first is not None and first.values is None:
            first.values = v_BHTD
        elif first is not None and first.values is not None:
            v_BHTD = v_BHTD + self.mixed(first.values)
        return self.merge(self.attend(q_BHTD, k_BHTD, v_BHTD))


class FirstValuesOfTraining(FirstValuesOfTheBatch):
    fails = "mode"

    def mixed(self, first_BHTD: Tensor) -> Tensor:
        return first_BHTD * (2 if self.training else 1)


class FinalNormOfTheBatch(nn.LayerNorm):
    """The norm of layer 3, the final one of a model of 3 layers, adds the mean over the batch."""

    part, fails = "norm", "batch"

    def __init__(self, spec: AttentionSpec, layer: int = 0) -> None:
        super().__init__(spec.width)
        self.final = layer == spec.layers

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean(0, keepdim=True) if self.final else x)


BROKEN_PARTS: dict[str, type[nn.Module]] = {
    kind.__name__.upper(): kind
    for kind in (
        NormOverTime,
        NormOverTheBatch,
        RunningStatistics,
        MLPThatMixesPositions,
        DeadMLP,
        ShiftedMLP,
        RelativeToTheEnd,
        RotationBackwards,
        IgnoresStart,
        RotationIgnoresStart,
        CentredOverTime,
        LearnedPositionOfTheBatch,
        FirstValuesOfTheBatch,
        FirstValuesOfTraining,
        FinalNormOfTheBatch,
    )
}
