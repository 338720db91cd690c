"""Broken attentions: each class is one fault, and `fails` names the check that must find it."""

import math
import os
import random
import time
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.model.transformer import CausalSelfAttention


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


class BatchNormOverTime(Broken):
    """Statistics over batch and time: its running buffers change as well."""

    fails = "state"

    def __init__(self, width: int, *arguments: Any) -> None:
        super().__init__(width, *arguments)
        self.normalise = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.normalise(x.transpose(1, 2)).transpose(1, 2))


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


class KeyValueState(Broken):
    fails = "deterministic"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cache: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.cache is not None and self.cache.shape == v.shape:
            v = v + 0.1 * self.cache
        self.cache = v.detach()
        return self.fused(q, k, v)


_GLOBAL: dict[str, Tensor] = {}


class GlobalState(Broken):
    fails = "deterministic"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = _GLOBAL.get("q")
        _GLOBAL["q"] = q.detach()
        return self.fused(q if before is None or before.shape != q.shape else q + before, k, v)


class StepCounter(Broken):
    fails = "deterministic"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.register_buffer("steps", torch.zeros(()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.steps += 1
        return self.fused(q, k, v) * (1 + 0.1 * torch.tanh(self.steps))


class MovingAverage(Broken):
    """Statistics that training collects and evaluation uses."""

    fails = "state"

    def __init__(self, width: int, *arguments: Any) -> None:
        super().__init__(width, *arguments)
        self.register_buffer("average", torch.ones(()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(v.detach().abs().mean().to(self.average.dtype), 0.1)
        return self.fused(q, k, v)


class DropoutLeftOn(Broken):
    fails = "deterministic"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(self.fused(q, k, v), 0.1)


class DropoutInTraining(Broken):
    """Its rate ignores spec.dropout, and nothing declares it."""

    fails = "deterministic"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.drop = nn.Dropout(0.1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.drop(self.fused(q, k, v))


class ConfiguredDropoutInEvaluation(Broken):
    fails = "deterministic"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(self.fused(q, k, v), self.dropout)


class RandomFromTime(Broken):
    fails = "deterministic"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        generator = torch.Generator().manual_seed(time.time_ns() % 2**31)
        self.scale = nn.Parameter(torch.rand(self.heads, 1, 1, generator=generator) + 0.5)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q * self.scale, k, v)


class RandomFromTheSystem(Broken):
    fails = "deterministic"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scale = nn.Parameter(torch.tensor(1 + os.urandom(1)[0] / 256 + random.random()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q * self.scale, k, v)


class HashOfAString(Broken):
    fails = "process"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scale = nn.Parameter(torch.tensor(1 + hash("scale") % 1000 / 1000))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q * self.scale, k, v)


class OtherInEvaluation(Broken):
    """The soft mix in training, a hard branch in evaluation, as in the 2025 study."""

    fails = "mode"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.training:
            return 0.5 * self.fused(q, k, v) + 0.5 * self.fused(k, q, v)
        return self.fused(q, k, v)


class InPlace(Broken):
    fails = "inplace"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x += 0.1 * y
        return y


class MeanOverTheBatch(Broken):
    fails = "batch"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v - v.mean(0, keepdim=True))


class BatchOrder(Broken):
    fails = "batch"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = 1 + 0.1 * torch.arange(q.shape[0], dtype=q.dtype)
        return self.fused(q * scale.view(-1, 1, 1, 1), k, v)


class DividedByTheBatch(Broken):
    fails = "batch"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v) / q.shape[0]


class NeighbouringSequences(Broken):
    """view instead of transpose: values of other sequences and positions."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.project(x.reshape(T, B, C).transpose(0, 1))
        return self.merge(self.attend(q, k, v)).transpose(0, 1).reshape(B, T, C)


class ScaledByLength(Broken):
    fails = "length"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q * math.log(q.shape[2] + 1), k, v)


class PositionsFromTheEnd(Broken):
    fails = "length"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        back = torch.arange(q.shape[2], 0, -1, dtype=q.dtype)
        return self.fused(q, k, v * torch.exp(-back / 50)[:, None])


class OneToken(Broken):
    fails = "shape"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, -1:]


class WrongHeadSize(Broken):
    fails = "shape"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v)[..., : v.shape[-1] // 2]


class Tuple(Broken):
    fails = "shape"

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class HalfPrecision(Broken):
    fails = "shape"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).half()


class OnlyMultiplesOf16(Broken):
    fails = "shape"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v.unflatten(2, (-1, 16)).flatten(2, 3))


class FixedHeads(Broken):
    fails = "shape"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q * torch.ones(5, 1, 1), k, v)


class FailsForOneToken(Broken):
    fails = "shape"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(
            q / v[0, 0, :, 0].std(correction=0).clamp_min(1) * (1 if q.shape[2] > 1 else [][0]), k, v
        )


class UnprotectedExponential(Broken):
    fails = "finite"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = scores_of(q, k).exp().masked_fill(future(q.shape[2]), 0)
        return weights / weights.sum(-1, keepdim=True) @ v


class DivisionByANorm(Broken):
    fails = "finite"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v)


class MaskedFirstRow(Broken):
    """A strict mask hides everything from position 0: softmax of -inf only."""

    fails = "finite"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores_of(q, k).masked_fill(future(q.shape[2], 0), -math.inf).softmax(-1) @ v


class DeadParameter(Broken):
    fails = "gradients"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.temperature = nn.Parameter(torch.ones(()))


class DeadAtZero(Broken):
    """Both factors start at zero, so neither can leave it."""

    fails = "gradients"

    def __init__(self, width: int, *arguments: Any) -> None:
        super().__init__(width, *arguments)
        self.down = nn.Parameter(torch.zeros(width, 4))
        self.up = nn.Parameter(torch.zeros(4, width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down @ self.up


class DetachedKeys(Broken):
    fails = "gradients"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k.detach(), v)


class ScalarByItem(Broken):
    fails = "gradients"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.temperature = nn.Parameter(torch.ones(()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q * self.temperature.item(), k, v)


class _WrongScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor) -> Tensor:
        return q.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 1.1 * gradients[0]


class WrongBackward(Broken):
    fails = "gradients"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(_WrongScale.apply(q), k, v)


class UnregisteredModules(Broken):
    fails = "gradients"

    def __init__(self, width: int, *arguments: Any) -> None:
        super().__init__(width, *arguments)
        self.extra = [nn.Linear(width, width)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra[0].to(x.dtype)(x)


_SCALES: dict[int, nn.Parameter] = {}


class SharedBetweenLayers(Broken):
    """The default of a shared object: one parameter in every layer."""

    fails = "shared"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scale = _SCALES.setdefault(self.heads, nn.Parameter(torch.ones(self.heads, 1, 1)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q * self.scale, k, v)


class ViewOfTheQueries(Broken):
    fails = "shared"

    def __init__(self, width: int, *arguments: Any) -> None:
        super().__init__(width, *arguments)
        self.gate = nn.Parameter(self.qkv.weight.data[:width])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(x @ self.gate)


class MaskOfThreeDimensions(Broken):
    """torch's fused CPU kernel takes no mask of three dimensions: the call would store a T x T matrix."""

    fails = "step"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = ~future(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(self.heads, -1, -1))


BROKEN = {kind.__name__.upper(): kind for kind in Broken.__subclasses__()}
