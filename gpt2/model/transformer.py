"""GPT-2, pre-LN, with the attention of each layer given from outside.

    tokens ─ token + position embedding ─ dropout
        └─> [ x + attention(norm(x)) ; x + mlp(norm(x)) ] x layers ─ norm ─ head (the token embedding again)

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). The vocabulary of 50257 is padded
to a multiple of 128 for the matrix units; padded logits are never part of an output, a softmax or a gradient.

Shapes: B batch, T tokens, C channels, H heads, D head size, V padded vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.model.cpu_linear import gelu_again, gelu_linear, linear
from gpt2.model.loss import compute_dtype, linear_cross_entropy, token_losses
from gpt2.model.recompute import activations, into_product, made_again

INITIAL_STD = 0.02  # GPT-2's; residual projections get 0.02 / sqrt(2 * layers)


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """The weights stay unset until `initialise`."""


class _Widening(_Linear):
    """One with more outputs than inputs, which a CPU has a faster product for."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _Narrowing(_Linear):
    """The MLP's second layer, of what `MLP.forward` gives it: gelu(x), or x where backward makes the GELU again."""

    def forward(self, x: Tensor) -> Tensor:
        if gelu_again(x):
            return gelu_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """The weights stay unset until `initialise`."""


class CausalSelfAttention(nn.Module):
    """Standard causal self-attention, and the projections that every other attention shares.

    y_i = sum_{j<=i} softmax_j(Q_i . K_j / sqrt(D)) V_j

    An attention of another kind overrides `attend` and nothing else. One with parameters of its own may define
    `optimizer_settings` (see gpt2.train.optimizer) and `learned_scalars` (recorded at each evaluation);
    `begin_step(iteration)`
    is called before each training step where it is defined. One whose steps are not all the same operations defines
    `kind_of_step(iteration)` as well, a hashable: where steps are compiled, the first of each kind is on the compile
    clock. What its constructor sets stays: only what it shares with this one is drawn anew by `initialise`.

    forward: x_BTC (B, T, C) -> (B, T, C), same dtype and device.
    """

    attention_calls: float = 1  # fused attention calls a forward pass, for counting FLOPs

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of {heads} heads")
        self.heads = heads
        self.dropout = dropout
        self.qkv = _Widening(width, 3 * width)
        self.proj = _Linear(width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = self.project(x_BTC)
        return self.merge(self.attend(q_BHTD, k_BHTD, v_BHTD))

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        """Mix the values: (B, H, T, D) each -> (B, H, T, D). Position i may use positions j <= i only."""
        return self.fused(q_BHTD, k_BHTD, v_BHTD)

    def fused(
        self, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, scale: float | None = None
    ) -> Tensor:
        """One fused causal attention call: memory linear in T. `scale` defaults to 1/sqrt(D)."""
        return F.scaled_dot_product_attention(
            query_BHTD,
            key_BHTD,
            value_BHTD,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            scale=scale,
        )

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x_BTC -> query, key and value, (B, H, T, D) each."""
        B, T, C = x_BTC.shape
        qkv = self.qkv(x_BTC).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q_BHTD, k_BHTD, v_BHTD = qkv.unbind(0)  # in backward one stack; three indices would be three sums
        return q_BHTD, k_BHTD, v_BHTD

    def merge(self, y_BHTD: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, T, C), through the output projection and dropout."""
        return self.output(self.joined(y_BHTD))

    def joined(self, y_BHTD: Tensor) -> Tensor:
        """The heads side by side: (B, H, T, D) -> (B, T, C)."""
        return y_BHTD.transpose(1, 2).flatten(2)

    def output(self, y_BTC: Tensor) -> Tensor:
        """The output projection and dropout: (B, T, C) -> (B, T, C)."""
        return F.dropout(self.proj(y_BTC), self.dropout, self.training)


class MLP(nn.Module):
    """Width -> 4 x width -> width with the tanh GELU that GPT-2 was trained with."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.fc = _Widening(width, 4 * width)
        self.proj = _Narrowing(4 * width, width)
        self.dropout = dropout

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden = self.fc(x_BTC)
        if not gelu_again(hidden):
            if activations():
                return self.dropped(into_product(_gelu, self.proj, hidden))
            hidden = _gelu(hidden)  # what it was made of is let go before the product
        return self.dropped(self.proj(hidden))

    def dropped(self, y_BTC: Tensor) -> Tensor:
        return F.dropout(y_BTC, self.dropout, self.training)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.normed(self.norm1, x_BTC))
        return x_BTC + self.mlp(self.normed(self.norm2, x_BTC))

    def normed(self, norm: nn.Module, x_BTC: Tensor) -> Tensor:
        """norm(x_BTC); where it is made again, in the dtype that the next product runs in.

        That cast belongs inside: its result is what the product reads, and torch.compile would keep it. Eager autograd
        keeps it anyway, and has nothing made again.
        """
        if activations() and torch.compiler.is_compiling():
            return made_again(lambda x: norm(x).to(compute_dtype(x)), x_BTC)
        y_BTC: Tensor = norm(x_BTC)
        return y_BTC


class GPT2(nn.Module):
    """The language model. `attention(layer)` gives the attention module of each layer, 0 .. layers-1.

    forward: ids_BT int64 -> logits (B, T, vocabulary). For training and scoring use `loss` and `token_losses`,
    which never hold the logits of more than a chunk of rows. Weights are unset until `initialise` is called.
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
        attention: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        if padded_vocabulary < vocabulary:
            raise ValueError(f"padded vocabulary {padded_vocabulary} is below the vocabulary {vocabulary}")
        self.vocabulary = vocabulary
        self.block_size = block_size
        self.dropout = dropout
        make = attention or (lambda layer: CausalSelfAttention(width, heads, dropout))
        self.token = _Embedding(padded_vocabulary, width)
        self.position = _Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, make(layer), dropout) for layer in range(layers))
        self.norm = nn.LayerNorm(width)

    @property
    def head(self) -> Tensor:
        """The head's weight (V, C): tied to the token embedding."""
        weight: Tensor = self.token.weight
        return weight

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """ids_BT -> x_BTC after the final layer norm. T must not exceed block_size."""
        T = ids_BT.shape[1]
        if T > self.block_size:
            raise ValueError(f"{T} tokens exceed the block size {self.block_size}")
        x_BTC = self.token(ids_BT) + self.position.weight[:T]
        x_BTC = F.dropout(x_BTC, self.dropout, self.training)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        out: Tensor = self.norm(x_BTC)
        return out

    def forward(self, ids_BT: Tensor) -> Tensor:
        return F.linear(self.hidden(ids_BT), self.head[: self.vocabulary])

    def loss(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats over the targets, a differentiable scalar."""
        return linear_cross_entropy(self.hidden(ids_BT), self.head, targets_BT, self.vocabulary)

    @torch.no_grad()
    def token_losses(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Cross-entropy in nats of each position, (B, T) float32; a target of -1 is not scored and gives 0."""
        return token_losses(self.hidden(ids_BT), self.head, targets_BT, self.vocabulary)

    def flops_per_token(self, tokens: int | None = None) -> float:
        """Matrix FLOPs of one training token: 6 a matrix weight (head included), causal attention at half.

        forward + backward = 3 x forward; a multiply-add is 2 FLOPs. Attention of one layer and fused call over
        `tokens` (default block_size) positions: 3 x 2 x 2 x C x T / 2 = 6 C T, since a causal mask leaves half.
        Kaplan et al. 2020 (arXiv:2001.08361), with the causal half and without the embedding look-up.
        """
        width = self.token.weight.shape[1]
        matrices = sum(p.numel() for name, p in self.blocks.named_parameters() if p.dim() == 2)
        calls = sum(getattr(block.attention, "attention_calls", 1) for block in self.blocks)
        return 6 * (matrices + self.vocabulary * width) + 6 * calls * width * (tokens or self.block_size)


def drawn_from(seed: int, name: str) -> int:
    """The seed of the generator that is keyed by (seed, name)."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1


def keyed_normal(seed: int, name: str, shape: torch.Size) -> Tensor:
    """Standard normal float32 tensor that is a pure function of (seed, name, shape).

    Drawn on the CPU from a generator of its own, in float64 (whose draw does not depend on the width of the
    processor's vector units, unlike float32's) and then rounded.
    """
    generator = torch.Generator("cpu").manual_seed(drawn_from(seed, name))
    return torch.randn(shape, generator=generator, dtype=torch.float64).float()


@contextlib.contextmanager
def keyed_generator(seed: int, name: str) -> Iterator[None]:
    """Within, what torch draws on the CPU without a generator is keyed by (seed, name); then all is as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            drawn_from(seed, name)
        )  # torch.manual_seed would reach every card
        yield


def keyed_attention(
    attention: Callable[[int], nn.Module] | None, seed: int
) -> Callable[[int], nn.Module] | None:
    """The same attentions; what their constructors draw is a pure function of (seed, layer), in any process."""
    if attention is None:
        return None

    def make(layer: int) -> nn.Module:
        with keyed_generator(seed, f"blocks.{layer}.attention"):
            return attention(layer)

    return make


def standard_shapes(model: GPT2) -> dict[str, torch.Size]:
    """Names and shapes of the parameters that the model has with standard attention: what all variants share."""
    with torch.device("meta"):
        standard = CausalSelfAttention(model.token.weight.shape[1], 1)
    shapes = {
        name: parameter.shape
        for name, parameter in model.named_parameters()
        if ".attention." not in name  # blocks.<layer>.attention.<the variant's>
    }
    for layer in range(len(model.blocks)):
        for name, parameter in standard.named_parameters():
            shapes[f"blocks.{layer}.attention.{name}"] = parameter.shape
    return shapes


def shared_names(model: GPT2) -> list[str]:
    """The standard model's names that this model has, at the standard shape; every other parameter is its own."""
    shapes = standard_shapes(model)
    return [name for name, parameter in model.named_parameters() if shapes.get(name) == parameter.shape]


def _unset_names(model: GPT2) -> set[str]:
    """Names of the parameters whose module leaves them unset, in the standard model or in a variant's attention."""
    modules = [name for name, module in model.named_modules() if isinstance(module, (_Linear, _Embedding))]
    return {f"{name}.{kind}" for name in modules for kind in ("weight", "bias")}


def initial_value(seed: int, name: str, shape: torch.Size, layers: int) -> Tensor:
    """What a parameter starts as: biases 0, norms 1, matrices and embeddings drawn from (seed, name); float32."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) < 2:
        return torch.ones(shape)
    residual = name.endswith(("attention.proj.weight", "mlp.proj.weight"))
    return keyed_normal(seed, name, shape) * (
        INITIAL_STD / math.sqrt(2 * layers) if residual else INITIAL_STD
    )


@torch.no_grad()
def initialise(model: GPT2, seed: int) -> list[str]:
    """Set GPT-2's initial weights, each tensor drawn from (seed, its name): the same for every variant and device.

    Returns the names that were set, in the model's order: those that it shares with the standard model, and what an
    attention has made with the unset layers of this module. Every other parameter of an attention keeps the value
    that its module gave it. Padded vocabulary rows are zero.
    """
    to_set = {*shared_names(model), *_unset_names(model)}
    names = []
    for name, parameter in model.named_parameters():
        if name in to_set:
            parameter.copy_(initial_value(seed, name, parameter.shape, len(model.blocks)))
            names.append(name)
    model.token.weight[model.vocabulary :] = 0.0
    return names


def weights_digest(model: GPT2, seed: int) -> str:
    """SHA-256 over names and bytes of the standard model's tensors as this model has them, on whatever device.

    A name that the model lacks, or has at another shape, is its own matter: in its place stands what the standard
    model starts with at that seed. So the digest differs exactly where something shared does.
    """
    digest = hashlib.sha256()
    shapes, shared = standard_shapes(model), set(shared_names(model))
    parameters = dict(model.named_parameters())
    for name in sorted(shapes):
        if name in shared:
            tensor = parameters[name].detach().cpu()
        else:
            tensor = initial_value(seed, name, shapes[name], len(model.blocks))
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def learned_scalars(model: GPT2) -> dict[str, list[float]]:
    """What the attentions have learned of their own, by name, one value a layer that has it, in layer order."""
    collected: dict[str, list[float]] = {}
    for block in model.blocks:
        scalars: Callable[[], dict[str, float]] | None = getattr(block.attention, "learned_scalars", None)
        for name, value in (scalars() if scalars else {}).items():
            collected.setdefault(name, []).append(value)
    return collected
