"""A small model, and the zip of its checklist."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from referee.numerics import ConfigChecker


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 4)
        self.act = nn.GELU()
        self.register_buffer("mask", torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(self.norm(x)))


def small_model() -> Any:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(4, 4), Block(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    return model.eval()


def pack(path: Path, change: Callable[[Any], Any] = lambda model: None, **options: Any) -> Path:
    model = small_model()
    model = change(model) or model
    torch.manual_seed(1)
    ConfigChecker(
        model, [__file__], output_zip_path=path, optimizer=torch.optim.AdamW(model.parameters()), **options
    )
    model(options.pop("tokens", torch.tensor([[0, 1]])))
    return path
