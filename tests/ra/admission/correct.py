"""Correct attentions that look unusual: none of them may be refused."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.transformer import CausalSelfAttention
from tests.ra.admission.leaking import future, scores_of


class Correct(CausalSelfAttention):
    pass


class SlidingWindow(Correct):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[2]
        far = torch.ones(T, T, dtype=torch.bool).tril(-8)
        return scores_of(q, k).masked_fill(future(T) | far, -math.inf).softmax(-1) @ v


class ALiBi(Correct):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2])
        distance = positions[:, None] - positions
        slopes = 2.0 ** -torch.arange(1, self.heads + 1)
        bias = -slopes[:, None, None] * distance
        scores = scores_of(q, k) + bias.to(q.dtype)
        return scores.masked_fill(future(q.shape[2]), -math.inf).softmax(-1) @ v


class Rotary(Correct):
    """With a cache of the angles that grows with T."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.angles = torch.empty(0)

    def turn(self, x: Tensor) -> Tensor:
        T, D = x.shape[-2:]
        if len(self.angles) < T:
            frequencies = 10000.0 ** (-torch.arange(0, D, 2) / D)
            self.angles = torch.outer(torch.arange(T), frequencies)
        angles = self.angles[:T].to(x)
        even, odd = x[..., ::2], x[..., 1::2]
        turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
        return torch.stack(turned, -1).flatten(-2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(self.turn(q), self.turn(k), v)


class CachedMask(Correct):
    """A buffer that is created at the first call and is not saved."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[2]
        if not hasattr(self, "mask") or self.mask.shape[0] < T:
            self.register_buffer("mask", future(T), persistent=False)
        return scores_of(q, k).masked_fill(self.mask[:T, :T], -math.inf).softmax(-1) @ v


class LinearAttention(Correct):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = (k[..., None] * v[..., None, :]).cumsum(2)
        norm = (q * k.cumsum(2)).sum(-1, keepdim=True)
        return (q[..., None, :] @ state).squeeze(-2) / (norm + 1e-6)


class ChunkedLinearAttention(Correct):
    """Pads to whole chunks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[2]
        pad = -T % 16
        q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, 16)) for x in (q, k, v))
        inner = (q @ k.transpose(-1, -2)).tril() @ v
        states = (k.transpose(-1, -2) @ v).cumsum(2)
        before = torch.cat([torch.zeros_like(states[:, :, :1]), states[:, :, :-1]], 2)
        return (inner + q @ before).flatten(2, 3)[:, :, :T] / 16


class SharedKeys(Correct):
    """Keys are the queries."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, q + 0.5 * k, v)


class TiedProjections(Correct):
    """One linear layer under two names."""

    def __init__(self, width: int, *arguments: Any) -> None:
        super().__init__(width, *arguments)
        self.first = nn.Linear(width, width)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x) + self.second(x).tanh())


class GatedOutput(Correct):
    def __init__(self, width: int, *arguments: Any) -> None:
        super().__init__(width, *arguments)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(self.gate(x))


class ZeroGate(Correct):
    """ReZero: the branch has no gradient until the gate has moved."""

    def __init__(self, width: int, *arguments: Any) -> None:
        super().__init__(width, *arguments)
        self.gate = nn.Parameter(torch.zeros(()))
        self.branch = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.gate * self.branch(x)


class LearnedTemperature(Correct):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.temperature = nn.Parameter(torch.ones(self.heads, 1, 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q / self.temperature, k, v)


class TalkingHeads(Correct):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.before = nn.Parameter(torch.eye(self.heads))
        self.after = nn.Parameter(torch.eye(self.heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("gh,bhij->bgij", self.before, scores_of(q, k))
        shares = scores.masked_fill(future(q.shape[2]), -math.inf).softmax(-1)
        return torch.einsum("gh,bhij->bgij", self.after, shares) @ v


class QKNorm(Correct):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scale = nn.Parameter(torch.tensor(10.0))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return self.fused(q * self.scale, k, v)


class MultiQuery(nn.Module):
    """Not a subclass of the baseline: one key and one value head."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.keyvalue = nn.Linear(width, 2 * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = (part[:, None].expand_as(q) for part in self.keyvalue(x).chunk(2, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GroupedQuery(Correct):
    """Needs a number of heads that the small model may lack."""

    wide = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def grouped(x: Tensor) -> Tensor:
            return (
                x.unflatten(1, (4, -1))
                .mean(2, keepdim=True)
                .expand(-1, -1, self.heads // 4, -1, -1)
                .flatten(1, 2)
            )

        return self.fused(q, grouped(k), grouped(v))


class Sink(Correct):
    """Softmax with one more logit of zero."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = scores_of(q, k).masked_fill(future(q.shape[2]), -math.inf)
        zero = torch.zeros_like(scores[..., :1])
        return torch.cat([zero, scores], -1).softmax(-1)[..., 1:] @ v


class RelativeBias(Correct):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.bias = nn.Parameter(torch.zeros(self.heads, 64))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2])
        distance = (positions[:, None] - positions).clamp(0, 63)
        scores = scores_of(q, k) + self.bias[:, distance]
        return scores.masked_fill(future(q.shape[2]), -math.inf).softmax(-1) @ v


class Differential(Correct):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.amount = nn.Parameter(torch.tensor(0.5))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
        wide = [F.scaled_dot_product_attention(*pair, v, is_causal=True) for pair in ((q1, k1), (q2, k2))]
        return wide[0] - self.amount * wide[1]


class CausalConvolution(Correct):
    def __init__(self, width: int, *arguments: Any) -> None:
        super().__init__(width, *arguments)
        self.local = nn.Conv1d(width, width, 4, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.local(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2))


class FourierConvolution(Correct):
    """A causal convolution by padded FFT: the rounding of a transform reaches every position."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.decay = nn.Parameter(torch.linspace(0.1, 1, self.heads)[:, None, None])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = v.shape[2]
        kernel = torch.exp(-self.decay.abs() * torch.arange(T, dtype=v.dtype)[:, None])
        mixed = torch.fft.irfft(torch.fft.rfft(v, 2 * T, 2) * torch.fft.rfft(kernel, 2 * T, 1), 2 * T, 2)
        return self.fused(q, k, mixed[:, :, :T])


class ExponentialDecay(Correct):
    """A retention with one decay a head, near 1."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.decay = nn.Parameter(torch.linspace(2, 4, self.heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2])
        distance = (positions[:, None] - positions).clamp_min(0).to(q.dtype)
        decay = torch.sigmoid(self.decay)[:, None, None] ** distance
        return (scores_of(q, k) * decay).tril() @ v


class FloatSoftmax(Correct):
    """Its softmax is always float32."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = scores_of(q, k).masked_fill(future(q.shape[2]), -math.inf)
        return scores.float().softmax(-1).to(v.dtype) @ v


class OnlyFloat32(Correct):
    """A constant that is not a buffer keeps its dtype."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout)
        self.rotation = torch.linalg.qr(torch.randn(width // heads, width // heads))[0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q @ self.rotation, k, v)


class TopKeys(Correct):
    """Each query attends to its four best keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = scores_of(q, k).masked_fill(future(q.shape[2]), -math.inf)
        least = scores.topk(min(4, q.shape[2]), -1).values[..., -1:]
        return scores.masked_fill(scores < least, -math.inf).softmax(-1) @ v


class ReluAttention(Correct):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count = torch.arange(1, q.shape[2] + 1, dtype=q.dtype)[:, None]
        return F.relu(scores_of(q, k)).tril() @ v / count


class RunningMean(Correct):
    """A normalisation over the past."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count = torch.arange(1, v.shape[2] + 1, dtype=v.dtype)[:, None]
        return self.fused(q, k, v - v.cumsum(2) / count)


class DeclaredNoise(Correct):
    """Random in training, and says so."""

    stochastic = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q + 0.1 * torch.randn_like(q) if self.training else q, k, v)


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class BinaryKeys(Correct):
    """Straight-through, declared."""

    surrogate_gradient = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q, _Sign.apply(k), v)


class DeclaredSharing(Correct):
    """One scale for all layers, on purpose."""

    shared_parameters = ("scale",)
    scales: dict[int, nn.Parameter] = {}  # noqa: RUF012

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scale = self.scales.setdefault(self.heads, nn.Parameter(torch.ones(())))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fused(q * self.scale, k, v)


class FrozenFeatures(Correct):
    """Random features that are drawn once and not trained."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout)
        self.features = nn.Parameter(torch.randn(width // heads, 16), requires_grad=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q @ self.features, k @ self.features, v, is_causal=True)


class OddLayersOnly(Correct):
    """Another attention in the odd layers."""

    @classmethod
    def make(cls, layer: int, spec: Any) -> nn.Module:
        kind = SlidingWindow if layer % 2 else CausalSelfAttention
        return kind(spec.width, spec.heads, spec.dropout)


CORRECT = {kind.__name__.upper(): kind for kind in [*Correct.__subclasses__(), MultiQuery]}
