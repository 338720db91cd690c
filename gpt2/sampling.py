"""Sampling with a cache of queries, keys and values. Training does not import this file.

With a cache, a step computes the projections of its new tokens only and attends to the stored rows of earlier tokens.
Reciprocal attention permits that as standard attention does: row i needs K_i and the Q_j and V_j of j <= i, and none of
them depends on a later token. It stores Q where standard attention stores K. The learned mixes need both, so that the
cache holds q, k and v of every layer.

An attention is cached if it mixes its values by `fused` alone, as all variants of ra do. `CacheError` names another
one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.transformer import GPT2, CausalSelfAttention, FirstValues


class CacheError(TypeError):
    """An attention cannot be cached."""


@dataclass
class LayerCache:
    """q, k and v of the tokens so far, (B, H, T, D) each; None before the first step."""

    rows: tuple[Tensor, Tensor, Tensor] | None = None

    def append(self, new: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Store the rows of new tokens and return all rows."""
        if self.rows is not None:
            q, k, v = (torch.cat(pair, dim=2) for pair in zip(self.rows, new, strict=True))
            new = (q, k, v)
        self.rows = new
        return new


@dataclass
class Cache:
    """The cache of one batch of sequences. `clear` it before other sequences."""

    layers: list[LayerCache] = field(default_factory=list)
    length: int = 0  # tokens so far: the position of the next one

    def clear(self) -> None:
        self.layers, self.length = [], 0


@torch.no_grad()
def logits(model: GPT2, ids_BT: Tensor, cache: Cache | None = None) -> Tensor:
    """Compute the logits (B, T, vocabulary) of ids_BT, which follow the tokens in the cache.

    ValueError in training mode and beyond the block size. CacheError for an attention that cannot be cached.
    """
    if model.training:
        raise ValueError("the model is in training mode; fix: model.eval()")
    if cache is None:
        found: Tensor = model(ids_BT)
        return found
    start, end = cache.length, cache.length + ids_BT.shape[1]
    if end > model.block_size:
        raise ValueError(f"{end} tokens exceed the block size {model.block_size}")
    if not cache.layers:
        cache.layers = [LayerCache() for _ in model.blocks]
    x_BTC = model.position(model.token(ids_BT), start)
    first = FirstValues()  # of all tokens, as the cached layers return them
    blocks: list[Any] = list(model.blocks)
    for block, layer in zip(blocks, cache.layers, strict=True):
        with decoding(block.attention, layer, start):
            x_BTC = block(x_BTC, first)
    cache.length = end
    return F.linear(model.norm(x_BTC), model.head[: model.vocabulary])


@contextmanager
def decoding(attention: object, layer: LayerCache, start: int) -> Iterator[None]:
    """Let an attention project new tokens only and compute only their rows.

    `project` returns the rows of all tokens, so that `attend` mixes them as it always does. `fused` computes the last
    rows of the query, those of the new tokens.
    """
    name = type(attention).__name__
    if not isinstance(attention, CausalSelfAttention):
        raise CacheError(
            f"{name} is not a CausalSelfAttention, so its keys and values are unknown; fix: sample without a cache"
        )
    project, merge, tokens = attention.project, attention.merge, 0

    def project_new(x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal tokens
        tokens = x_BTC.shape[1]
        return layer.append(project(x_BTC))

    def fused_rows(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        total = key.shape[2]
        allowed = torch.ones(tokens, total, dtype=torch.bool, device=key.device).tril(total - tokens)
        return F.scaled_dot_product_attention(
            query[:, :, -tokens:], key, value, attn_mask=allowed, scale=scale
        )

    def merge_rows(y_BHTD: Tensor) -> Tensor:
        if y_BHTD.shape[2] != tokens:
            raise CacheError(f"{name} mixes values outside `fused`; fix: sample without a cache")
        return merge(y_BHTD)

    replaced: dict[str, object] = {"project": project_new, "fused": fused_rows, "merge": merge_rows}
    if attention.rotate is not None:
        replaced["rotate"] = functools.partial(attention.rotate, start=start)
    before = {method: vars(attention)[method] for method in replaced if method in vars(attention)}
    vars(attention).update(replaced)
    try:
        yield
    finally:
        for method in replaced:
            del vars(attention)[method]
        vars(attention).update(before)


@dataclass(frozen=True)
class Drawing:
    """How a token is drawn from the model's probabilities. ValueError for a value out of range.

    temperature: divides the logits; 0 takes the most probable token. top_k: only the k most probable tokens; 0: all.
    top_p: after that, only the smallest set of most probable tokens that together have at least this probability
    (Holtzman et al. 2020, arXiv:1904.09751).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} is not a finite number from 0; fix: 0.8")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} is below 0; fix: 0 (all tokens) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p {self.top_p} is not above 0 and at most 1; fix: 0.9")

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """Return the probabilities (B, V) from which a token is drawn, float32."""
        logits_BV = logits_BV.float()
        if self.temperature == 0.0:
            return F.one_hot(logits_BV.argmax(-1), logits_BV.shape[-1]).float()
        logits_BV = logits_BV / self.temperature
        if 0 < self.top_k < logits_BV.shape[-1]:
            least_B1 = logits_BV.topk(self.top_k).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -math.inf)
        probabilities_BV = logits_BV.softmax(-1)
        if self.top_p < 1.0:
            sorted_BV, order_BV = probabilities_BV.sort(descending=True, stable=True)
            before_BV = sorted_BV.cumsum(-1) - sorted_BV  # of the tokens that are more probable
            kept_BV = torch.zeros_like(sorted_BV).scatter(-1, order_BV, (before_BV < self.top_p).float())
            probabilities_BV = probabilities_BV * kept_BV
            probabilities_BV = probabilities_BV / probabilities_BV.sum(-1, keepdim=True)
        return probabilities_BV


@dataclass(frozen=True)
class Sample:
    """Sampled tokens (B, new), and the model's log-probability of each at its step, (B, new) float32, nats.

    The log-probability is that of the model at temperature 1, whatever the drawing.
    """

    tokens: Tensor
    log_probs: Tensor


@torch.no_grad()
def sample(
    model: GPT2,
    prompt_BT: Tensor,
    new: int,
    generators: Sequence[torch.Generator],
    cache: Cache | None = None,
    drawing: Drawing | None = None,
) -> Sample:
    """Sample `new` tokens after each prompt. The tokens of a sequence do not depend on the others of the batch.

    generators: one for each prompt, on the CPU, so that every device draws the same numbers. cache: prefill stores the
    prompt in it, then each step decodes one token. Without it every step reads all tokens.
    """
    drawing = drawing or Drawing()
    ids_BT, tokens, log_probs = prompt_BT, [], []
    unread_BT = prompt_BT
    for _ in range(new):
        last_BV = logits(model, ids_BT if cache is None else unread_BT, cache)[:, -1].float()
        rows = zip(drawing.probabilities(last_BV).cpu(), generators, strict=True)
        drawn = [torch.multinomial(row_V, 1, generator=generator) for row_V, generator in rows]
        chosen_B1 = torch.stack(drawn).to(last_BV.device)
        tokens.append(chosen_B1)
        log_probs.append(last_BV.log_softmax(-1).gather(1, chosen_B1))
        ids_BT, unread_BT = torch.cat([ids_BT, chosen_B1], dim=1), chosen_B1
    return Sample(torch.cat(tokens, dim=1), torch.cat(log_probs, dim=1))


@torch.no_grad()
def response_log_probs(model: GPT2, prompt_BT: Tensor, response_BT: Tensor) -> Tensor:
    """Compute the log-probability of each response token as training does: one pass over prompt and response."""
    ids_BT = torch.cat([prompt_BT, response_BT], dim=1)
    log_BTV = logits(model, ids_BT[:, :-1]).float().log_softmax(-1)[:, prompt_BT.shape[1] - 1 :]
    return log_BTV.gather(2, response_BT[..., None])[..., 0]
