"""Ranks of tensor parallelism against one process: shards, partial sums, and what differs between ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numerics import Recorder, RecorderConfig
from numerics.compare.compare_records import compare_records

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Part(nn.Module):
    """A part of an MLP, split by columns and then by rows. rest: what the other ranks add to its result."""

    def __init__(self, rank: int | None = None, bias_on: tuple[int, ...] = (0,)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.rest: Tensor = torch.zeros(6, 8)
        self.gradients: list[Tensor] = []  # of the norm's result, of all ranks
        if rank is not None:
            for value, axis in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)):
                value.data = value.data.chunk(2, axis)[rank].clone()
            self.down.bias.data *= float(rank in bias_on)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.gradients:
            y.register_hook(lambda gradient: torch.stack(self.gradients).sum(0))
        return self.rest + self.down(F.gelu(self.up(y)))


def record(folder: Path, models: list[Part], task: str) -> Path:
    for rank, model in enumerate(models):
        os.environ["RANK"] = str(rank)
        recorder = Recorder(RecorderConfig(dump_path=str(folder), task=task))
        recorder.start(model)
        model(X).square().mean().backward()
        recorder.stop()
        recorder.step()
    del os.environ["RANK"]
    return folder


def parallel(folder: Path, reduced: bool, task: str, bias_on: tuple[int, ...] = (0,)) -> Path:
    models = [Part(rank, bias_on) for rank in (0, 1)]
    for model, other in zip(models, models[::-1], strict=True):
        model.rest = other.down(F.gelu(other.up(other.norm(X)))).detach()
    gradients = []
    for model in models:
        y = model.norm(X)
        loss = (model.rest + model.down(F.gelu(model.up(y)))).square().mean()
        gradients.append(torch.autograd.grad(loss, y)[0])
    for model in models:
        model.gradients = gradients if reduced else []
    return record(folder, models, task)


@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_ranks_are_merged_as_the_shapes_of_one_process_say(task: str, tmp_path: Path) -> None:
    golden = record(tmp_path / "golden", [Part()], task)
    found = compare_records(parallel(tmp_path / "right", True, task), golden, ranks="merged")
    assert found.first is None, found.first
    assert found.verdict_text.endswith(", incomplete") == (
        task == "statistics"
    )  # partial sums have no statistics
    found = compare_records(parallel(tmp_path / "lost", False, task), golden, ranks="merged")
    assert found.first
    assert found.first.direction == "backward"
    assert "input of Module.norm" in found.first.call


def test_a_bias_that_each_rank_adds_is_named(tmp_path: Path) -> None:
    golden = record(tmp_path / "golden", [Part()], "tensor")
    target = parallel(tmp_path / "twice", True, "tensor", bias_on=(0, 1))
    first = compare_records(target, golden, ranks="merged").first
    assert first
    assert (first.module, first.side, first.evidence) == ("down", "output", "computed")
