"""A very small language model on the text of the standard library, with the norms of its gradients at each step."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.referee.numerics.trend.monitor_files import write_losses, write_monitor

WIDTH, LENGTH, BATCH, VOCABULARY = 16, 64, 16, 128
Fault = Callable[[int, nn.Module], None]  # step, model; after backward


class Model(nn.Module):
    """dtype: in which the gradients of the embedding's rows are summed. Forward is that of bfloat16 weights in both."""

    def __init__(self, layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        weights = self.embedding.weight.bfloat16().to(self.dtype)
        x_BTC = F.embedding(ids_BT, weights).float()
        mask_TT = nn.Transformer.generate_square_subsequent_mask(ids_BT.shape[1])
        for block in self.blocks:
            x_BTC = block(x_BTC, src_mask=mask_TT, is_causal=True)
        logits_BTV: Tensor = self.head(x_BTC)
        return logits_BTV


def train(
    folder: Path,
    steps: int = 100,
    layers: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    fault: Fault | None = None,
    rate: float = 3e-3,
    length: int = LENGTH,
) -> Path:
    """Train and write monitor files of the gradients and metrics.jsonl."""
    torch.manual_seed(seed)
    text = torch.tensor([min(ord(sign), VOCABULARY - 1) for sign in inspect.getsource(argparse)])
    model = Model(layers, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    generator = torch.Generator().manual_seed(seed)
    names = [name for name, _ in model.named_parameters()]
    norms, losses = np.zeros((len(names), steps)), []
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - length - 1, (BATCH,), generator=generator)
        ids = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if fault is not None:
            fault(step, model)
        gradients = [parameter.grad for parameter in model.parameters()]
        norms[:, step - 1] = [float(one.norm()) if one is not None else 0.0 for one in gradients]
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    write_monitor(folder, norms, tensors=names)
    write_losses(folder, losses, np.sqrt(np.square(norms).sum(axis=0)).tolist())
    return folder
