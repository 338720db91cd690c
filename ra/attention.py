"""Reciprocal attention: the roles of query and key exchanged, for good or by a learned share.

Every path masks after the exchange, so position i sees j <= i only, in training as in evaluation; and every path
is one or two fused attention calls, so that memory stays linear in T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.model.recompute import checkpoint_through_linear
from gpt2.model.transformer import CausalSelfAttention


class ReciprocalAttention(CausalSelfAttention):
    """Causal self-attention with the roles of query and key exchanged.

    y_i = sum_{j<=i} softmax_j(K_i . Q_j / sqrt(D)) V_j

    With W_Q and W_K renamed this is standard attention: the two are one function class.
    """

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        return self.fused(k_BHTD, q_BHTD, v_BHTD)


class LearnedAttention(CausalSelfAttention):
    """A learned share of reciprocal attention, one logit a layer; the same function in training and evaluation.

    p = sigmoid(alternation_logit);  y = (1 - p) y_standard + p y_reciprocal

    Kept for backward beyond what standard attention keeps: the second call's output and softmax statistics. Each
    call keeps its output anyway; the mix of the two, which the output projection needs, is made again from them in
    backward, to the bit. With `recompute` the calls themselves are made again as well, and only q, k and v are kept.
    """

    attention_calls: float = 2

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        initial_probability: float,
        learning_rate_multiplier: float,
        recompute: bool = False,
    ) -> None:
        super().__init__(width, heads, dropout)
        self.recompute = recompute
        if not 0.0 < initial_probability < 1.0:
            raise ValueError(
                f"initial probability {initial_probability} is not between 0 and 1, both excluded"
            )
        logit = math.log(initial_probability) - math.log1p(-initial_probability)
        self.alternation_logit = nn.Parameter(torch.tensor(logit))
        self.learning_rate_multiplier = learning_rate_multiplier

    def probability(self) -> Tensor:
        """The share p of the reciprocal path, a scalar in (0, 1)."""
        return torch.sigmoid(self.alternation_logit)

    def optimizer_settings(self) -> dict[str, float]:
        """The logit has a parameter group of its own: no weight decay, a multiple of the learning rate."""
        return {"alternation_logit": self.learning_rate_multiplier}

    def learned_scalars(self) -> dict[str, float]:
        return {"alternation_probability": float(self.probability().detach())}

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv = self.project(x_BTC)
        if not torch.is_grad_enabled():
            return self.merge(self.attend(*qkv))
        made: Callable[..., Tensor] = self.attend if self.recompute else self.mix
        kept = qkv if self.recompute else self.paths(*qkv)
        y_BTC = checkpoint_through_linear(
            lambda *parts: self.concat_heads(made(*parts)), self.proj, *kept, random=self.dropout > 0
        )
        return nn.functional.dropout(y_BTC, self.dropout, self.training)

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        return self.mix(*self.paths(q_BHTD, k_BHTD, v_BHTD))

    def paths(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, ...]:
        """What is kept for backward and mixed: the two outputs, (B, H, T, D) each."""
        return self.fused(q_BHTD, k_BHTD, v_BHTD), self.fused(k_BHTD, q_BHTD, v_BHTD)

    def mix(self, *paths: Tensor) -> Tensor:
        """The paths -> y (B, H, T, D)."""
        standard, reciprocal = paths
        p = self.probability()  # a scalar: it keeps float32 while the product stays in v's dtype
        return (1 - p) * standard + p * reciprocal


class LearnedScoreAttention(LearnedAttention):
    """The share is taken of the scores, before the softmax: one call on heads twice as wide.

    softmax_j(((1 - p) Q_i . K_j + p K_i . Q_j) / sqrt(D)) = softmax_j([(1-p) Q, p K]_i . [K, Q]_j / sqrt(D))

    The values are padded with zeros to the same head size, which every fused kernel accepts. Call and operands are
    always made again in backward: kept, they would be seven times a layer's output.
    """

    attention_calls: float = 2  # one call of twice the head size

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recompute = True

    def paths(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, ...]:
        """The one output, (B, H, T, 2 D), of which the second half is zero."""
        p = self.probability()
        query = torch.cat([(1 - p) * q_BHTD, p * k_BHTD], dim=-1)
        key = torch.cat([k_BHTD, q_BHTD], dim=-1)
        D = v_BHTD.shape[-1]
        return (self.fused(query, key, nn.functional.pad(v_BHTD, (0, D)), scale=1 / math.sqrt(D)),)

    def mix(self, *paths: Tensor) -> Tensor:
        (wide,) = paths
        return wide[..., : wide.shape[-1] // 2]


class _StraightThrough(torch.autograd.Function):
    """Forward: 1 where p > 0.5, else 0. Backward: the identity (Bengio et al. 2013, arXiv:1308.3432)."""

    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        return (p > 0.5).to(p.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


class LearnedHardAttention(LearnedAttention):
    """One path only: reciprocal where p > 0.5, else standard.

    The value is that of the chosen path exactly. The gate's straight-through gradient, <dL/dy, y_reciprocal -
    y_standard>, needs the other path as well: in training both are computed at every `gate_every`-th step, at which
    the gate moves. At the steps between, and without gradients, one call is made.
    """

    def __init__(self, *arguments: Any, gate_every: int = 1, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if gate_every < 1:
            raise ValueError(f"the gate moves every {gate_every} steps; right: at least 1")
        self.gate_every, self.measures = gate_every, True
        self.attention_calls = 1 + 1 / gate_every  # on the mean

    def begin_step(self, iteration: int) -> None:
        """Which steps move the gate is a function of the iteration alone, so that a resumed run does the same."""
        self.measures = self.kind_of_step(iteration)

    def kind_of_step(self, iteration: int) -> bool:
        """Whether the step moves the gate: it makes two calls, the others one."""
        return iteration % self.gate_every == 0

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.measures or not torch.is_grad_enabled():
            return super().forward(x_BTC)
        return self.merge(self.fused(*self.project_chosen(x_BTC)))

    def project_chosen(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value (B, H, T, D) with the roles exchanged where p > 0.5.

        The rows of W_Q and W_K are exchanged rather than q and k: less to copy, and no waiting for the device to
        learn which path it is.
        """
        B, T, C = x_BTC.shape
        swap = self.probability().detach() > 0.5
        weight, bias = (self._exchanged(parameter, swap) for parameter in (self.qkv.weight, self.qkv.bias))
        qkv = nn.functional.linear(x_BTC, weight, bias).view(B, T, 3, self.heads, C // self.heads)
        q_BHTD, k_BHTD, v_BHTD = qkv.permute(2, 0, 3, 1, 4)
        return q_BHTD, k_BHTD, v_BHTD

    @staticmethod
    def _exchanged(parameter: Tensor, swap: Tensor) -> Tensor:
        """The rows of W_Q and W_K exchanged where `swap` (a scalar) is true."""
        query, key, value = parameter.chunk(3)
        return torch.cat([torch.where(swap, key, query), torch.where(swap, query, key), value])

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().attend(q_BHTD, k_BHTD, v_BHTD)
        reciprocal = bool(self.probability() > 0.5)
        return self.fused(k_BHTD, q_BHTD, v_BHTD) if reciprocal else self.fused(q_BHTD, k_BHTD, v_BHTD)

    def mix(self, *paths: Tensor) -> Tensor:
        standard, reciprocal = paths
        gate: Tensor = _StraightThrough.apply(self.probability())
        return (1 - gate) * standard + gate * reciprocal
