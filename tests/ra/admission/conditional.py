"""Attentions that are broken under one condition alone: a position, a batch size, a step, a number of calls."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.transformer import CausalSelfAttention
from tests.ra.admission.leaking import Broken, future, scores_of, uncausal


class LeakAtOnePosition(Broken):
    """Position 40 sees position 41, and nothing else is wrong."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = future(q.shape[2])
        hidden[40:41, 41:42] = False
        return scores_of(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ v


class LeakInALargeBatch(Broken):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return uncausal(q, k, v) if len(q) >= 16 else self.fused(q, k, v)


class LeakInBfloat16(Broken):
    autocast = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return uncausal(q, k, v) if q.dtype == torch.bfloat16 else self.fused(q, k, v)


class LeakInTheMiddleOfTraining(Broken):
    open = False

    def begin_step(self, iteration: int) -> None:
        self.open = 50 < iteration < 200

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return uncausal(q, k, v) if self.open else self.fused(q, k, v)


class OtherLengths(Broken):
    """A path for 70 to 90 tokens."""

    fails = "length"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v) * (1.1 if 70 < q.shape[2] < 90 else 1)


class MeanOverALargeBatch(Broken):
    fails = "batch"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v - 0.1 * v.mean(0, keepdim=True) if len(v) >= 8 else v)


class PairsOfSequences(Broken):
    fails = "batch"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(q) % 2 or len(q) < 6:
            return self.fused(q, k, v)
        return self.fused(q, k, v + 0.1 * v.unflatten(0, (-1, 2)).flip(1).flatten(0, 1))


class BatchInBfloat16(Broken):
    fails, autocast = "batch", True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v - v.mean(0, keepdim=True) if q.dtype == torch.bfloat16 else v)


class BatchAtALaterStep(Broken):
    fails, late = "batch", False

    def begin_step(self, iteration: int) -> None:
        self.late = iteration >= 100

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v - v.mean(0, keepdim=True) if self.late else v)


class BatchInRandomTraining(Broken):
    """Random in training, where it also subtracts the mean over the batch."""

    fails, stochastic = "batch", True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.training:
            q, v = q + 0.1 * torch.randn_like(q), v - v.detach().mean(0, keepdim=True)
        return self.fused(q, k, v)


class ShortContextInEvaluation(Broken):
    """Evaluation sees the last 100 positions alone, training all."""

    fails = "mode"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        far = torch.ones_like(future(q.shape[2])).tril(-100) & (not self.training)
        return scores_of(q, k).masked_fill(future(q.shape[2]) | far, -math.inf).softmax(-1) @ v


class OtherModeAtALaterStep(Broken):
    fails, late = "mode", False

    def begin_step(self, iteration: int) -> None:
        self.late = iteration >= 100

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v) * (1.1 if self.late and self.training else 1)


class OtherWhenCompiled(Broken):
    fails = "mode"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, k, v) * (1.1 if torch.compiler.is_compiling() else 1)


class AverageInEvaluation(Broken):
    """A plain attribute, not a buffer: collected in training, used in evaluation."""

    fails = "deterministic"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.average: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.training:
            self.average = v.detach().mean((0, 2), keepdim=True)
        elif self.average is not None:
            v = v - self.average
        return self.fused(q, k, v)


class CallCounter(Broken):
    """A warm-up of 1000 training passes."""

    fails = "deterministic"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += self.training
        return self.fused(q, k, v) * (0.5 if self.calls < 1000 else 1)


class TensorCounter(Broken):
    """Counts in a tensor that is no buffer."""

    fails = "deterministic"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls = torch.zeros(())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        return self.fused(q, k, v) * (0.5 if self.calls < 1000 else 1)


class FormerWeights(Broken):
    """The first evaluation keeps its weights for all later ones."""

    fails = "deterministic"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None and not self.training:
            self.kept = self.proj.weight.detach().clone()
        y = self.concat_heads(self.attend(*self.project(x)))
        weight = self.proj.weight if self.training or self.kept is None else self.kept
        return nn.functional.linear(y, weight, self.proj.bias)


class HookOfAParameter(Broken):
    fails = "gradients"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scale = nn.Parameter(torch.ones(()))
        self.scale.register_hook(torch.neg)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q * self.scale, k, v)


class Unusual(CausalSelfAttention):
    """Correct under every condition."""


class CountsItsCalls(Unusual):
    """For a log."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        return self.fused(q, k, v)


class WeightsOfOneEvaluation(Unusual):
    """Keeps its weights while it evaluates; train() clears them."""

    kept: Tensor | None = None

    def train(self, mode: bool = True) -> "WeightsOfOneEvaluation":
        self.kept = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.kept is None:
            self.kept = self.proj.weight.detach().clone()
        y = self.concat_heads(self.attend(*self.project(x)))
        weight = self.proj.weight if torch.is_grad_enabled() or self.kept is None else self.kept
        return nn.functional.linear(y, weight, self.proj.bias)


class GrowingWindow(Unusual):
    """Its schedule ends after 500 steps."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.windows = list(range(8, 508))
        self.window = 8

    def begin_step(self, iteration: int) -> None:
        self.window = self.windows[iteration]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        far = torch.ones_like(future(q.shape[2])).tril(-self.window)
        return scores_of(q, k).masked_fill(future(q.shape[2]) | far, -math.inf).softmax(-1) @ v


class HookThatLooks(Unusual):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scale, self.norms = nn.Parameter(torch.ones(())), []
        self.scale.register_hook(lambda gradient: self.norms.append(float(gradient)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q * self.scale, k, v)


class OneSequenceAtATime(Unusual):
    """A loop where the batch is small."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(q) >= 8:
            return self.fused(q, k, v)
        return torch.cat([self.fused(*one) for one in zip(q.split(1), k.split(1), v.split(1), strict=True)])


class Recurrent(Unusual):
    """Retention: parallel in training and where compiled, recurrent in evaluation, also in bfloat16."""

    autocast = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rate = (1 - 2.0 ** (-2 - torch.arange(self.heads, dtype=q.dtype)))[:, None, None]
        if self.training:
            positions = torch.arange(q.shape[2])
            return (
                q @ k.transpose(-1, -2) * rate ** (positions[:, None] - positions).clamp_min(0)
            ).tril() @ v
        state = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None])
        outputs = []
        for t in range(q.shape[2]):
            state = rate * state + k[:, :, t, :, None] * v[:, :, t, None]
            outputs.append(q[:, :, t, None] @ state)
        return torch.cat(outputs, 2)


CONDITIONAL = {kind.__name__.upper(): kind for kind in Broken.__subclasses__() if kind.__module__ == __name__}
UNUSUAL = {kind.__name__.upper(): kind for kind in Unusual.__subclasses__()}
