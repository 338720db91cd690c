"""GPT-2, pre-LN. The caller may supply the attention, norm and MLP of each layer, and the positions.

    tokens ─ token + position embedding ─ dropout
        └─> [ x + attention(norm(x)) ; x + mlp(norm(x)) ] x layers ─ norm ─ head (tied to the token embedding)

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). The vocabulary of 50257 is padded
to a multiple of 128 for the matrix units. Padded logits enter no output, no softmax and no gradient.

Shapes: B batch, T tokens, C channels, H heads, D head size, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.cpu_linear import gelu_linear, linear, recompute_gelu
from gpt2.loss import RowLosses, compute_dtype, linear_cross_entropy, target_losses_sliced, token_losses


class UnsetLinear(nn.Linear):
    """nn.Linear whose weights stay unset until gpt2.initial_weights.initialise."""

    def reset_parameters(self) -> None:
        """Draw nothing."""


class ExpandLinear(UnsetLinear):
    """Linear layer with more outputs than inputs. Uses oneDNN's faster product on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class ContractLinear(UnsetLinear):
    """MLP output projection. Takes gelu(x), or raw x with `gelu`, which is then recomputed in backward."""

    def forward(self, x: Tensor, gelu: bool = False) -> Tensor:
        if gelu and recompute_gelu(x):
            return gelu_linear(x, self.weight, self.bias)
        return F.linear(F.gelu(x, approximate="tanh") if gelu else x, self.weight, self.bias)


class UnsetEmbedding(nn.Embedding):
    """nn.Embedding whose weights stay unset until gpt2.initial_weights.initialise."""

    def reset_parameters(self) -> None:
        """Draw nothing."""


class LearnedPosition(UnsetEmbedding):
    """A learned embedding of each position, added to the token embedding.

    Another position module has the same `forward`. It may also define `rotate(q_BHTD, k_BHTD, start)`, which every
    attention applies to its queries and keys.
    """

    def forward(self, x_BTC: Tensor, start: int = 0) -> Tensor:
        """Add the embeddings of positions start .. start+T-1."""
        added: Tensor = x_BTC + self.weight[start : start + x_BTC.shape[1]]
        return added


@dataclass
class FirstValues:
    """The values of the first layer in one pass, (B, H, T, D); None before that layer."""

    values: Tensor | None = None


Rotate = Callable[..., tuple[Tensor, Tensor]]  # (q_BHTD, k_BHTD, start=0)


class CausalSelfAttention(nn.Module):
    """Standard causal self-attention, with the projections that every other attention shares.

    y_i = sum_{j<=i} softmax_j(Q_i . K_j / sqrt(D)) V_j

    Another attention overrides `attend` only. An attention may also define:

        optimizer_settings()   learning-rate multipliers of its parameters (gpt2.optimizer)
        learned_scalars()      values recorded at each evaluation
        begin_step(iteration)  of any module: called before each training step. After a checkpoint is loaded it is
                               called with the last step
        kind_of_step(iteration)  hashable; steps of different kinds run different operations. Where steps are compiled,
                               the first step of each kind counts on the compile clock
        draw_noise(name, seed, iteration, iterations), clear_noise()   of any module: set its noise before each training
                               step, and remove it. name: of the module
        stochastic = True      its training passes draw random numbers; the seed of a run seeds them
        mixes_first_values = True  its `forward` also takes a FirstValues, which the first layer fills

    `initialise` sets the parameters shared with this class. Others keep the value from the constructor.

    forward: x_BTC (B, T, C) -> (B, T, C), same dtype and device.
    """

    attention_calls: float = 1  # fused attention calls per forward pass; used to count FLOPs
    rotate: Rotate | None = None  # of the model's position module; the model sets it

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of {heads} heads")
        self.heads = heads
        self.dropout = dropout
        self.qkv = ExpandLinear(width, 3 * width)
        self.proj = UnsetLinear(width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = self.project(x_BTC)
        return self.merge(self.attend(q_BHTD, k_BHTD, v_BHTD))

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        """Mix the values: (B, H, T, D) each -> (B, H, T, D). Position i may use positions j <= i only."""
        return self.fused(q_BHTD, k_BHTD, v_BHTD)

    def fused(
        self, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, scale: float | None = None
    ) -> Tensor:
        """Call fused causal attention once; memory is linear in T. `scale` defaults to 1/sqrt(D)."""
        parts = (query_BHTD, key_BHTD, value_BHTD)
        # fused kernels need heads whose channels are adjacent in memory
        query_BHTD, key_BHTD, value_BHTD = (x if x.stride(-1) == 1 else x.contiguous() for x in parts)
        return F.scaled_dot_product_attention(
            query_BHTD,
            key_BHTD,
            value_BHTD,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            scale=scale,
        )

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x_BTC to query, key and value, (B, H, T, D) each; query and key rotated by their positions."""
        B, T, C = x_BTC.shape
        qkv = self.qkv(x_BTC).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        # backward of unbind is one stack; indexing three times would be three sums
        q_BHTD, k_BHTD, v_BHTD = qkv.unbind(0)
        return *self.positioned(q_BHTD, k_BHTD), v_BHTD

    def positioned(self, q_BHTD: Tensor, k_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query and key where the position module of the model does that."""
        return self.rotate(q_BHTD, k_BHTD) if self.rotate is not None else (q_BHTD, k_BHTD)

    def merge(self, y_BHTD: Tensor) -> Tensor:
        """Concatenate heads, project and drop out: (B, H, T, D) -> (B, T, C)."""
        return F.dropout(self.proj(self.concat_heads(y_BHTD)), self.dropout, self.training)

    def concat_heads(self, y_BHTD: Tensor) -> Tensor:
        """Concatenate heads: (B, H, T, D) -> (B, T, C)."""
        return y_BHTD.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """Width -> 4 x width -> width with the tanh GELU that GPT-2 was trained with."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.fc = ExpandLinear(width, 4 * width)
        self.proj = ContractLinear(4 * width, width)
        self.dropout = dropout

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden = self.fc(x_BTC)
        if recompute_gelu(hidden):
            return F.dropout(self.proj(hidden, gelu=True), self.dropout, self.training)
        hidden = F.gelu(hidden, approximate="tanh")  # frees the GELU's input before the product
        return F.dropout(self.proj(hidden), self.dropout, self.training)


@dataclass(frozen=True)
class ModelParts:
    """Builders of the modules of a model; None: GPT-2's.

    attention, norm, mlp: layer -> module that maps (B, T, C) to (B, T, C). norm: for both norms of a layer, and for the
    final one with layer = layers. position: builds a module with the `forward` of LearnedPosition.
    """

    attention: Callable[[int], nn.Module] | None = None
    norm: Callable[[int], nn.Module] | None = None
    mlp: Callable[[int], nn.Module] | None = None
    position: Callable[[], nn.Module] | None = None


class Block(nn.Module):
    """One layer: x + attention(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, norms: tuple[nn.Module, nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention = norms[0], attention
        self.norm2, self.mlp = norms[1], mlp

    def forward(self, x_BTC: Tensor, first: FirstValues | None = None) -> Tensor:
        shared = (first,) if getattr(self.attention, "mixes_first_values", False) else ()
        x_BTC = x_BTC + self.attention(self.norm1(x_BTC), *shared)
        mlp_BTC: Tensor = self.mlp(self.norm2(x_BTC))
        return x_BTC + mlp_BTC


class GPT2(nn.Module):
    """The language model.

    forward: ids_BT int64 -> logits (B, T, vocabulary). For training and scoring use `loss` and `token_losses`, which
    hold the logits of one chunk of rows at a time. Weights are unset until gpt2.initial_weights.initialise.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        width: int,
        block_size: int,
        vocabulary: int,
        padded_vocabulary: int,
        dropout: float = 0.0,
        parts: ModelParts | None = None,
    ) -> None:
        super().__init__()
        if padded_vocabulary < vocabulary:
            raise ValueError(f"padded vocabulary {padded_vocabulary} is below the vocabulary {vocabulary}")
        self.row_losses: RowLosses = target_losses_sliced  # a card compiles them
        self.bfloat16_residual = False  # under autocast the sum over the layers has autocast's dtype
        self.vocabulary = vocabulary
        self.block_size = block_size
        self.dropout = dropout
        parts = parts or ModelParts()
        norm = parts.norm or (lambda layer: nn.LayerNorm(width))
        attention = parts.attention or (lambda layer: CausalSelfAttention(width, heads, dropout))
        mlp = parts.mlp or (lambda layer: MLP(width, dropout))
        self.token = UnsetEmbedding(padded_vocabulary, width)
        self.position = parts.position() if parts.position else LearnedPosition(block_size, width)
        self.blocks = nn.ModuleList(
            Block((norm(layer), norm(layer)), attention(layer), mlp(layer)) for layer in range(layers)
        )
        self.norm = norm(layers)
        self._set_rotation()

    def _set_rotation(self) -> None:
        """Give every attention the rotation of the position module. TypeError for one that has no place for it."""
        rotate: Rotate | None = getattr(self.position, "rotate", None)
        if rotate is None:
            return
        for block in self.blocks:
            if not isinstance(block.attention, CausalSelfAttention):
                raise TypeError(
                    f"{type(block.attention).__name__} is not a CausalSelfAttention, so its queries and keys cannot be "
                    "rotated; fix: derive it from CausalSelfAttention"
                )
            block.attention.rotate = rotate

    @property
    def head(self) -> Tensor:
        """Return the head's weight (V, C), tied to the token embedding."""
        weight: Tensor = self.token.weight
        return weight

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Compute x_BTC after the final layer norm from ids_BT. T must not exceed block_size."""
        T = ids_BT.shape[1]
        if T > self.block_size:
            raise ValueError(f"{T} tokens exceed the block size {self.block_size}")
        x_BTC = self.position(self.token(ids_BT))
        x_BTC = self._narrowed(F.dropout(x_BTC, self.dropout, self.training))
        first = FirstValues()
        for block in self.blocks:
            x_BTC = block(x_BTC, first)
        return self._narrowed(self.norm(x_BTC))

    def _narrowed(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.to(compute_dtype(x_BTC)) if self.bfloat16_residual else x_BTC

    def forward(self, ids_BT: Tensor) -> Tensor:
        return F.linear(self.hidden(ids_BT), self.head[: self.vocabulary])

    def loss(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Compute the mean cross-entropy in nats over the targets: a differentiable scalar."""
        return linear_cross_entropy(self.hidden(ids_BT), self.head, targets_BT, self.vocabulary)

    @torch.no_grad()
    def token_losses(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Compute each position's cross-entropy in nats, (B, T) float32. A target of -1 is not scored and gives 0."""
        hidden = self.hidden(ids_BT)
        return token_losses(hidden, self.head, targets_BT, self.vocabulary, losses_of=self.row_losses)

    def flops_per_token(self) -> float:
        """Count the matrix FLOPs of one training token: 6 per matrix weight (head included), causal attention at half.

        forward + backward = 3 x forward; a multiply-add is 2 FLOPs. Attention of one layer and fused call over T =
        block_size positions: 3 x 2 x 2 x C x T / 2 = 6 C T, since the causal mask removes half. Kaplan et al. 2020
        (arXiv:2001.08361), with the causal half and without the embedding look-up.
        """
        width = self.token.weight.shape[1]
        matrices = sum(p.numel() for name, p in self.blocks.named_parameters() if p.dim() == 2)
        calls = sum(getattr(block.attention, "attention_calls", 1) for block in self.blocks)
        return 6 * (matrices + self.vocabulary * width) + 6 * calls * width * self.block_size


def restore_step(model: nn.Module, iteration: int) -> None:
    """Call `begin_step` with the last of `iteration` steps: a loaded model may be evaluated before a further step."""
    modules: list[Any] = [*model.modules()] if iteration else []
    for module in modules:
        if hasattr(module, "begin_step"):
            module.begin_step(iteration - 1)


def learned_scalars(model: GPT2) -> dict[str, list[float]]:
    """Collect the attentions' learned scalars: name -> one value per layer that has it, in layer order."""
    collected: dict[str, list[float]] = {}
    blocks: list[Any] = [*model.blocks]
    for block in blocks:
        scalars: Callable[[], dict[str, float]] | None = getattr(block.attention, "learned_scalars", None)
        for name, value in (scalars() if scalars else {}).items():
            collected.setdefault(name, []).append(value)
    return collected
