"""Measure the attention maps of the standard and the reciprocal path in slices of rows.

    standard    P_ij = softmax_{j<=i}(Q_i . K_j / sqrt(D))
    reciprocal  R_ij = softmax_{j<=i}(K_i . Q_j / sqrt(D))

Both use the layer's projections, whichever path the layer trains. One slice of rows at a time is computed in
float64. No (heads, T, T) tensor exists, so a sequence of 1024 needs a few tens of megabytes.

Shapes: H heads, T tokens, D head size, R rows of a slice, N side of a picture.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.transformer import GPT2, CausalSelfAttention

PIXELS = 256  # the largest side of a picture
SLICE_ROWS = 128


@dataclass
class PathStatistics:
    """Statistics of one path, each (H,): means over positions 1 .. T-1 (position 0 attends to itself only).

    entropy: bits. distance: mean of i - j, tokens. previous, first: attention mass on position i - 1 and on position 0.
    """

    entropy: Tensor
    distance: Tensor
    previous: Tensor
    first: Tensor


@dataclass
class LayerMaps:
    """Both paths of a layer and their distance: total variation (0 to 1) and Jensen-Shannon in bits (0 to 1).

    pictures: head -> (standard, reciprocal), (N, N) each: the attention mass from a block of queries to a block of
    keys, mean over the queries, so every row sums to 1.
    """

    standard: PathStatistics
    reciprocal: PathStatistics
    total_variation: Tensor
    jensen_shannon: Tensor
    pictures: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def attention_rows(query_HTD: Tensor, key_HTD: Tensor, first: int, last: int) -> Tensor:
    """Return rows first .. last-1 of causal softmax attention: (H, R, last) float64. Later columns are zero."""
    query_HRD = query_HTD[:, first:last].double()
    scores_HRT = query_HRD @ key_HTD[:, :last].double().transpose(1, 2) / math.sqrt(query_HTD.shape[2])
    positions = torch.arange(last)
    later_RT = positions[None, :] > positions[first:last, None]
    return scores_HRT.masked_fill(later_RT, -math.inf).softmax(2)


def entropy_bits(rows: Tensor) -> Tensor:
    """Return the entropy of distributions along the last dimension; 0 log 0 is 0."""
    return -torch.xlogy(rows, rows).sum(-1) / math.log(2)


def pixel_tokens(tokens: int, pixels: int) -> int:
    """Return the tokens per pixel of a picture of at most `pixels` a side."""
    return math.ceil(tokens / pixels)


@torch.no_grad()
def layer_maps(
    query_HTD: Tensor,
    key_HTD: Tensor,
    heads: Sequence[int] = (),
    pixels: int = PIXELS,
    slice_rows: int = SLICE_ROWS,
) -> LayerMaps:
    """Compute the statistics of every head and the pictures of `heads`. T must be at least 2."""
    H, T, _ = query_HTD.shape
    if T < 2:
        raise ValueError(f"{T} tokens are too few for attention statistics; fix: use at least 2")
    totals = torch.zeros(10, H, dtype=torch.float64)
    block = pixel_tokens(T, pixels)
    side = math.ceil(T / block)
    drawn = torch.zeros(2, len(heads), side, side, dtype=torch.float64)
    for start in range(0, T, slice_rows):
        stop = min(start + slice_rows, T)
        paths = [
            attention_rows(query_HTD, key_HTD, start, stop),
            attention_rows(key_HTD, query_HTD, start, stop),
        ]
        skip = 1 if start == 0 else 0
        sums = [_path_sums(path[:, skip:], start + skip) for path in paths]
        totals += torch.cat([*sums, _distance_sums(*(path[:, skip:] for path in paths))])
        for number, path in enumerate(paths):
            _draw(drawn[number], path[list(heads)], start, block)
    mean = totals / (T - 1)
    rows_of_block = torch.bincount(torch.arange(T) // block).double()
    drawn /= rows_of_block[:, None]
    pictures = {head: (drawn[0, place], drawn[1, place]) for place, head in enumerate(heads)}
    return LayerMaps(PathStatistics(*mean[0:4]), PathStatistics(*mean[4:8]), mean[8], mean[9], pictures)


def _path_sums(rows_HRT: Tensor, first: int) -> Tensor:
    """Sum entropy, distance, previous and first mass over rows that begin at position `first` > 0: (4, H)."""
    R, width = rows_HRT.shape[1:]
    queries, keys = torch.arange(first, first + R), torch.arange(width)
    distance = (rows_HRT * (queries[:, None] - keys[None, :]).double()).sum((1, 2))
    previous = rows_HRT[:, torch.arange(R), queries - 1].sum(1)
    return torch.stack([entropy_bits(rows_HRT).sum(1), distance, previous, rows_HRT[:, :, 0].sum(1)])


def _distance_sums(one_HRT: Tensor, other_HRT: Tensor) -> Tensor:
    """Sum the total variation and the Jensen-Shannon divergence in bits between rows: (2, H)."""
    variation = (one_HRT - other_HRT).abs().sum(2) / 2
    middle = entropy_bits((one_HRT + other_HRT) / 2)
    divergence = middle - (entropy_bits(one_HRT) + entropy_bits(other_HRT)) / 2
    return torch.stack([variation.sum(1), divergence.clamp(min=0).sum(1)])


def _draw(picture_HNN: Tensor, rows_HRT: Tensor, first: int, block: int) -> None:
    """Add rows that begin at position `first` to the picture. A pixel is a block of rows and columns."""
    width = rows_HRT.shape[2]
    columns = torch.arange(width) // block
    wide = torch.zeros(*rows_HRT.shape[:2], picture_HNN.shape[2], dtype=rows_HRT.dtype)
    wide.index_add_(2, columns, rows_HRT)
    places = torch.arange(first, first + rows_HRT.shape[1]) // block
    picture_HNN.index_add_(1, places, wide)


@torch.no_grad()
def queries_and_keys(model: GPT2, ids_T: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Compute layer -> (query, key), (H, T, D) each, on the sequence ids_T (T,) in evaluation mode.

    Layers whose attention is not a CausalSelfAttention have no defined query and key; they are skipped.
    """
    inputs: dict[nn.Module, Tensor] = {}
    blocks: list[Any] = list(model.blocks)
    layers = {n: b for n, b in enumerate(blocks) if isinstance(b.attention, CausalSelfAttention)}
    with contextlib.ExitStack() as hooks:
        for block in layers.values():
            hook = block.norm1.register_forward_hook(lambda norm, x, y: inputs.update({norm: y}))
            hooks.enter_context(hook)
        model.eval().hidden(ids_T[None])
    found = {}
    for layer, block in layers.items():
        query_BHTD, key_BHTD, _ = block.attention.project(inputs[block.norm1])
        found[layer] = (query_BHTD[0], key_BHTD[0])
    return found
