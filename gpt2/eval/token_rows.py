"""Score rows of tokens of any lengths: batch them by length, pad them, sum the losses of their last tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from gpt2.eval.validation import evaluating
from gpt2.model.transformer import GPT2
from referee.numerics.describe import to_float64
from runtime import ranks

Row = tuple[Sequence[int] | np.ndarray, int]  # tokens, and how many of them, at the end, are scored


def row_losses(
    model: GPT2,
    rows: Sequence[Row],
    *,
    batch_tokens: int,
    device: str,
    autocast: Callable[[], AbstractContextManager[Any]],
    stop: Callable[[], None] | None = None,
) -> list[float]:
    """Return for each row the nats of its scored tokens, summed in float64.

    Batches have at most batch_tokens padded tokens. `stop` is called before each batch and raises to end the scoring.
    Ranks share the batches.
    """

    def score_batch(indices: list[int]) -> list[float]:
        ids_BT, targets_BT = pad_rows([rows[index] for index in indices])
        with autocast():
            losses_BT = model.token_losses(ids_BT.to(device), targets_BT.to(device))
        losses: list[float] = to_float64(losses_BT).sum(1).tolist()
        return losses

    groups = list(batches([len(tokens) - 1 for tokens, _ in rows], batch_tokens))
    with evaluating(model):
        scored = ranks.map_shared(score_batch, groups, stop)
    found = [0.0] * len(rows)
    for indices, losses in zip(groups, scored, strict=True):
        for index, loss in zip(indices, losses, strict=True):
            found[index] = loss
    return found


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of row indices, longest rows first, with rows x longest <= batch_tokens.

    Longest first makes a batch that exceeds memory fail at the start. A row longer than batch_tokens forms one batch.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def pad_rows(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids_BT, targets_BT), int64. Right padding: id 0, which no earlier position attends to, and target -1."""
    ids, targets = [], []
    for tokens, scored in rows:
        row = torch.tensor(tokens)
        ids.append(row[:-1])
        targets.append(row[1:].clone())
        targets[-1][: max(0, len(tokens) - 1 - scored)] = -1
    return pad_sequence(ids, batch_first=True), pad_sequence(targets, batch_first=True, padding_value=-1)
