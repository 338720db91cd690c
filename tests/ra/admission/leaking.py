"""Attentions that see the future: each class is one fault."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.transformer import CausalSelfAttention


def future(tokens: int, offset: int = 1) -> Tensor:
    """True where a key lies in the future of its query."""
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(offset)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores_of(q, k).masked_fill(future(q.shape[2]), -math.inf).softmax(-1) @ v


def uncausal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class Broken(CausalSelfAttention):
    fails: ClassVar[str] = "causal"


class NoMask(Broken):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class MaskBeforeTranspose(Broken):
    """The reciprocal path of the 2025 study."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        masked = scores_of(q, k).masked_fill(future(q.shape[2]), -1e9)
        return masked.transpose(-1, -2).softmax(-1) @ v


class OffByOneMask(Broken):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores_of(q, k).masked_fill(future(q.shape[2], 2), -math.inf).softmax(-1) @ v


class SoftmaxOverQueries(Broken):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores_of(q, k).masked_fill(future(q.shape[2]), -1e9).softmax(-2) @ v


class SmallLeak(Broken):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v) + 1e-3 * v.mean(2, keepdim=True)


class LeakInEvaluation(Broken):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v) if self.training else uncausal(q, k, v)


class LeakInTraining(Broken):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return uncausal(q, k, v) if self.training else self.fused(q, k, v)


class LeakBeyond64(Broken):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = future(q.shape[2])
        hidden[64:] = False
        return scores_of(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ v


class LeakAtTheBlockSize(Broken):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return uncausal(q, k, v) if q.shape[2] >= 160 else self.fused(q, k, v)


class LeakInTheLastRows(Broken):
    """A chunked kernel whose last chunk is not masked."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[2]
        hidden = future(T)
        hidden[T - 3 :] = False
        return scores_of(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ v


class _LeakingFunction(torch.autograd.Function):
    """An attention kernel by hand, without a mask."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = scores_of(q, k).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q, k, v, weights = ctx.saved_tensors
        dy = gradients[0]
        dp = dy @ v.transpose(-1, -2)
        ds = weights * (dp - (dp * weights).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return ds @ k, ds.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ dy


class LeakByCustomFunction(Broken):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _LeakingFunction.apply(q, k, v)


class _LeakingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        return v.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + 0.01 * gradients[0].mean(2, keepdim=True)


class LeakInBackwardOnly(Broken):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, _LeakingBackward.apply(v))


class ZeroGatedLeak(Broken):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gate = nn.Parameter(torch.zeros(()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v) + self.gate * uncausal(q, k, v)


class NormalisedOverTime(Broken):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = self.fused(q, k, v)
        return y / (y.pow(2).mean((2, 3), keepdim=True) + 1e-6).sqrt()


class BatchStatisticsWithoutBuffers(Broken):
    def __init__(self, width: int, *arguments: Any) -> None:
        super().__init__(width, *arguments)
        self.normalise = nn.BatchNorm1d(width, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.normalise(x.transpose(1, 2)).transpose(1, 2))


class CentredConvolution(Broken):
    def __init__(self, width: int, *arguments: Any) -> None:
        super().__init__(width, *arguments)
        self.local = nn.Conv1d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.local(x.transpose(1, 2)).transpose(1, 2))


class CircularConvolution(Broken):
    """FFT without padding: the end wraps around to the start."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        decay = torch.exp(-torch.arange(v.shape[2], dtype=v.dtype))
        mixed = torch.fft.irfft(
            torch.fft.rfft(v, dim=2) * torch.fft.rfft(decay)[:, None], n=v.shape[2], dim=2
        )
        return self.fused(q, k, mixed)


class RolledTheWrongWay(Broken):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v + 0.1 * v.roll(-1, 2))


class LeakInOneLayer(Broken):
    """Only the last layer leaks."""

    @classmethod
    def make(cls, layer: int, spec: Any) -> nn.Module:
        kind = NoMask if layer == spec.layers - 1 else CausalSelfAttention
        return kind(spec.width, spec.heads, spec.dropout)


class LeakInTheLastHead(Broken):
    """Only the seventh head leaks, which the small model does not have."""

    wide = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = self.fused(q, k, v)
        return torch.cat([y[:, :6], uncausal(q, k, v)[:, 6:]], 1)


class LeakInFloat32(Broken):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return uncausal(q, k, v) if q.dtype == torch.float32 else self.fused(q, k, v)


class LeakWithGradientsOff(Broken):
    """The evaluation path has its own kernel, without the mask."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v) if torch.is_grad_enabled() else uncausal(q, k, v)


class NeighbouringSequences(Broken):
    """view instead of transpose: values of other sequences and positions."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.project(x.reshape(T, B, C).transpose(0, 1))
        return self.merge(self.attend(q, k, v)).transpose(0, 1).reshape(B, T, C)
