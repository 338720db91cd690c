"""Compute perplexity on fixed validation windows.

Shapes: n windows, T tokens scored in each, B windows a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from gpt2.transformer import GPT2
from referee.numerics.describe import to_float64
from runtime import ranks

EVALUATION_TOKENS = {"cpu": 4096, "card": 65536}  # per evaluation batch


def evaluation_tokens(device: str) -> int:
    """Return the tokens of an evaluation batch on a device or a kind of device."""
    return EVALUATION_TOKENS["cpu" if device.startswith("cpu") else "card"]


@dataclass(frozen=True)
class Validation:
    """loss: mean nats per token. tokens: number scored. window_losses: mean nats per token of each window, in order."""

    loss: float
    tokens: int
    window_losses: list[float]

    @property
    def perplexity(self) -> float | None:
        """Return exp(loss), None if it is not finite."""
        return perplexity_of(self.loss)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout, gradients and cuDNN's attention in the block; restore them afterwards, on errors too.

    cuDNN makes a plan for every length, and the sequences of HellaSwag have many.
    """
    modes = [(module, module.training) for module in model.modules()]
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for module, training in modes:
            module.training = training


def perplexity(
    model: GPT2,
    windows: np.ndarray,
    batch: int,
    device: str,
    autocast: Callable[[], AbstractContextManager[Any]],
    stop: Callable[[], None] | None = None,
) -> Validation:
    """Score windows (n, T+1) of token ids: T predictions each, `batch` windows at a time.

    Losses of single tokens are summed in float64, and the windows' sums exactly, so `batch` changes only the rounding
    inside the model. `stop` is called before each batch and raises to end the evaluation. Ranks share the batches.
    """
    if windows.ndim != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise ValueError(f"windows of shape {windows.shape}; fix: (n, T+1) with n and T at least 1")
    if batch < 1:
        raise ValueError(f"batch {batch}; fix: at least 1")

    def score(start: int) -> list[float]:
        ids = torch.from_numpy(windows[start : start + batch].astype(np.int64)).to(device)
        with autocast():
            losses_BT = model.token_losses(ids[:, :-1], ids[:, 1:])
        sums: list[float] = to_float64(losses_BT).sum(1).tolist()
        return sums

    with evaluating(model):
        scored = ranks.map_shared(score, range(0, len(windows), batch), stop)
    window_losses = [loss for losses in scored for loss in losses]
    tokens = windows.shape[0] * (windows.shape[1] - 1)
    loss = math.fsum(window_losses) / tokens
    means = [total / (windows.shape[1] - 1) for total in window_losses]
    return Validation(loss=loss, tokens=tokens, window_losses=means)


def perplexity_of(loss: float | None) -> float | None:
    """Return exp(loss); None without a loss, or if the result exceeds a float."""
    return math.exp(loss) if loss is not None and loss < 700 else None


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
