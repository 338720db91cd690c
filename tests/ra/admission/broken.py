"""Broken attentions: each class is one fault, and `fails` names the check that must find it."""

import math
import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ra.admission.leaking import Broken, future, scores_of


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


class BatchNormOverTime(Broken):
    """Statistics over batch and time: its running buffers change as well."""

    fails = "state"

    def __init__(self, width: int, *arguments: Any) -> None:
        super().__init__(width, *arguments)
        self.normalise = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.normalise(x.transpose(1, 2)).transpose(1, 2))


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
        self.scale = nn.Parameter(torch.tensor(1 + os.urandom(1)[0] / 256))

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


class _OtherSequences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor) -> Tensor:
        return q.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + 0.1 * gradients[0].flip(0)


class BatchInBackward(Broken):
    fails = "batch"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(_OtherSequences.apply(q), k, v)


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
