"""Compute perplexity on fixed validation windows.

Shapes: n windows, T tokens scored in each, B windows a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from gpt2.model.transformer import GPT2
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
