"""Reciprocal attention: exchange the roles of query and key, always or by a learned share.

Every path applies the mask after the exchange, so position i attends to j <= i only, in training and evaluation.
Every path is one or two fused attention calls, so memory is linear in T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.cpu_linear import checkpoint_through_linear
from gpt2.transformer import CausalSelfAttention


class ReciprocalAttention(CausalSelfAttention):
    """Causal self-attention with the roles of query and key exchanged.

    y_i = sum_{j<=i} softmax_j(K_i . Q_j / sqrt(D)) V_j

    With W_Q and W_K renamed this is standard attention: the two are one function class.
    """

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        return self.fused(k_BHTD, q_BHTD, v_BHTD)


@torch.no_grad()
def exchange_query_and_key(attention: CausalSelfAttention) -> None:
    """Exchange the rows of W_Q and W_K (weights and biases), in place."""
    for parameter in (attention.qkv.weight, attention.qkv.bias):
        query, key, value = parameter.chunk(3)
        parameter.copy_(torch.cat([key, query, value]))


class LearnedAttention(CausalSelfAttention):
    """Mix standard and reciprocal attention by a learned share, one logit per layer.

    p = sigmoid(alternation_logit);  y = y_standard + p (y_reciprocal - y_standard)

    The gradient of p is <dL/dy, y_reciprocal - y_standard>, one sum. From (1 - p) y_standard + p y_reciprocal autograd
    would compute the difference of two larger sums, each rounded to the dtype of y.

    Training and evaluation compute the same function. Compared with standard attention, backward also needs the
    second call's output and softmax statistics. Backward recomputes the mix from the two stored outputs, bitwise
    equal. With `recompute` it also recomputes the calls, and only q, k and v are stored.
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
        """Return the share p of the reciprocal path, a scalar in (0, 1)."""
        return torch.sigmoid(self.alternation_logit)

    def gate(self) -> Tensor:
        """Return the factor of the reciprocal path, a float32 scalar."""
        return self.probability()

    def optimizer_settings(self) -> dict[str, float]:
        """Give the logit a separate parameter group: no weight decay, a multiple of the learning rate."""
        return {"alternation_logit": self.learning_rate_multiplier}

    def learned_scalars(self) -> dict[str, float]:
        return {"alternation_probability": float(self.probability().detach())}

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv = self.project(x_BTC)
        if not torch.is_grad_enabled():
            return self.merge(self.attend(*qkv))
        inner: Callable[..., Tensor] = self.attend if self.recompute else self.mix
        stored = qkv if self.recompute else self.paths(*qkv)
        y_BTC = checkpoint_through_linear(
            lambda *parts: self.concat_heads(inner(*parts)), self.proj, *stored, random=self.dropout > 0
        )
        return nn.functional.dropout(y_BTC, self.dropout, self.training)

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        return self.mix(*self.paths(q_BHTD, k_BHTD, v_BHTD))

    def paths(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, ...]:
        """Return the two outputs, (B, H, T, D) each, which are mixed and stored for backward."""
        return self.fused(q_BHTD, k_BHTD, v_BHTD), self.fused(k_BHTD, q_BHTD, v_BHTD)

    def mix(self, *paths: Tensor) -> Tensor:
        """Mix the paths into y (B, H, T, D)."""
        standard, reciprocal = paths
        return torch.lerp(standard, reciprocal, self.gate().to(standard.dtype))


class LearnedScoreAttention(LearnedAttention):
    """Mix the scores before the softmax: one call on heads twice as wide.

    softmax_j(((1 - p) Q_i . K_j + p K_i . Q_j) / sqrt(D)) = softmax_j([(1-p) Q, p K]_i . [K, Q]_j / sqrt(D))

    The values are padded with zeros to the same head size, since fused kernels need one head size. Backward always
    recomputes the call and its operands, which together are seven times a layer's output.
    """

    attention_calls: float = 2  # one call of twice the head size

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recompute = True

    def paths(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, ...]:
        """Return the output, (B, H, T, 2 D). Its second half is zero."""
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
    """Select one path: reciprocal where p > 0.5, else standard.

    The output equals the selected path exactly. The gate's straight-through gradient, <dL/dy, y_reciprocal -
    y_standard>, needs both paths. Training computes both at every `gate_every`-th step, where the gate is updated.
    Other steps, and evaluation, make one call.
    """

    surrogate_gradient = ("alternation_logit",)  # declared for the examination: straight-through

    def __init__(self, *arguments: Any, gate_every: int = 1, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if gate_every < 1:
            raise ValueError(f"gate_every is {gate_every} steps; fix: use at least 1")
        self.gate_every, self.updates_gate = gate_every, True
        self.attention_calls = 1 + 1 / gate_every  # mean over the steps

    def begin_step(self, iteration: int) -> None:
        """Set whether this step updates the gate. It depends only on the iteration, so a resumed run repeats it."""
        self.updates_gate = self.kind_of_step(iteration)

    def kind_of_step(self, iteration: int) -> bool:
        """Return True if the step updates the gate. Such a step makes two attention calls, other steps one."""
        return iteration % self.gate_every == 0

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.updates_gate or not torch.is_grad_enabled():
            return super().forward(x_BTC)
        return self.merge(self.fused(*self.project_selected(x_BTC)))

    def project_selected(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value (B, H, T, D), with query and key exchanged where p > 0.5.

        Exchanging the rows of W_Q and W_K copies less than exchanging q and k. `where` needs no synchronisation
        with the device.
        """
        B, T, C = x_BTC.shape
        swap = self.probability().detach() > 0.5
        weight, bias = (self._exchanged(parameter, swap) for parameter in (self.qkv.weight, self.qkv.bias))
        qkv = nn.functional.linear(x_BTC, weight, bias).view(B, T, 3, self.heads, C // self.heads)
        q_BHTD, k_BHTD, v_BHTD = qkv.permute(2, 0, 3, 1, 4)
        return *self.positioned(q_BHTD, k_BHTD), v_BHTD

    @staticmethod
    def _exchanged(parameter: Tensor, swap: Tensor) -> Tensor:
        """Exchange the rows of W_Q and W_K where `swap` (a scalar) is true."""
        query, key, value = parameter.chunk(3)
        return torch.cat([torch.where(swap, key, query), torch.where(swap, query, key), value])

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().attend(q_BHTD, k_BHTD, v_BHTD)
        reciprocal = bool(self.probability() > 0.5)
        return self.fused(k_BHTD, q_BHTD, v_BHTD) if reciprocal else self.fused(q_BHTD, k_BHTD, v_BHTD)

    def gate(self) -> Tensor:
        gate: Tensor = _StraightThrough.apply(self.probability())
        return gate
