"""The operations of GPT-2 at given shapes, where no record is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from numerics.rounding.operation_checks import GENERATED, Operation, random_gradients
from numerics.rounding.within_rounding import FunctionCall

MOST = 1 << 22  # elements of the largest tensor; fewer sequences and tokens are taken where there were more


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model. tokens: of a sequence. sequences: at most."""

    width: int = 768
    heads: int = 12
    tokens: int = 1024
    vocabulary: int = 50304
    sequences: int = 2


def gpt2_operations(shapes: Shapes, dtype: torch.dtype) -> Iterator[Operation]:
    """Yield each operation of GPT-2's step with normal inputs and gradients, of the inner sizes of `shapes`."""
    draws = torch.Generator().manual_seed(0)
    C, V = shapes.width, shapes.vocabulary
    T = max(1, min(shapes.tokens, MOST // (4 * C)))
    B = max(1, min(shapes.sequences, MOST // (4 * C * T)))
    rows = max(1, min(B * T, MOST // V))  # of logits
    table = min(V, MOST // C)  # rows of the embedding; no sum of its operations depends on them
    D = C // shapes.heads
    heads = max(1, min(shapes.heads, MOST // T**2))

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=draws) * scale + mean).to(dtype)

    ids = torch.randint(table, (B, T), generator=draws)
    x, hidden = normal(B, T, C), normal(B, T, 4 * C)
    q, k, v = normal(B, heads, T, D), normal(B, heads, T, D), normal(B, heads, T, D)
    gain, shift = normal(C, scale=0.1, mean=1.0), normal(C, scale=0.1)
    logits, targets = normal(rows, V, scale=2.0), torch.randint(V, (rows,), generator=draws)
    listed: list[tuple[str, Any, list[Any], dict[str, Any]]] = [
        ("embedding", F.embedding, [ids, normal(table, C, scale=0.02)], {}),
        ("add", torch.add, [x, normal(B, T, C)], {}),
        ("layer_norm", F.layer_norm, [x, (C,), gain, shift], {}),
        ("linear_qkv", F.linear, [x, normal(3 * C, C, scale=0.02), normal(3 * C, scale=0.02)], {}),
        ("attention", F.scaled_dot_product_attention, [q, k, v], {"is_causal": True}),
        ("linear_expand", F.linear, [x, normal(4 * C, C, scale=0.02), normal(4 * C, scale=0.02)], {}),
        ("gelu_tanh", F.gelu, [hidden], {"approximate": "tanh"}),
        ("gelu_erf", F.gelu, [hidden], {}),
        ("linear_contract", F.linear, [hidden, normal(C, 4 * C, scale=0.02), normal(C, scale=0.02)], {}),
        ("linear_head", F.linear, [normal(B * T, C), normal(table, C, scale=0.02)], {}),
        ("softmax", F.softmax, [normal(heads, T, T), -1], {}),
        ("cross_entropy", F.cross_entropy, [logits, targets], {}),
        ("norm_of_gradient", torch.linalg.vector_norm, [normal(4 * C, C, scale=1e-3)], {}),
    ]
    for name, function, args, kwargs in listed:
        received = random_gradients([function(*args, **kwargs)])
        call = FunctionCall(function, args, kwargs, received)
        yield Operation(name, name.partition("_")[0], call, values=GENERATED)
