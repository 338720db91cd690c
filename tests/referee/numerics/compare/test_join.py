"""Micro-batches and merged layers: what one side calls once and the other several times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from referee.__main__ import main
from referee.numerics.compare.joined_calls import join_micro_batches
from referee.numerics.compare.tensor_difference import load
from referee.numerics.record.read_record import read_record
from tests.referee.numerics.compare.small_models import STATISTICS, TENSORS, ours, record
from tests.referee.numerics.corpus.models import MicroBatches


def test_joined_statistics_are_those_of_the_joined_tensor(tmp_path: Path) -> None:
    """The values were recorded, so that the statistics of the joined tensor can be computed."""
    parts = read_record(record(tmp_path, ours(), MicroBatches(parts=4), **TENSORS) / "rank0")
    whole = read_record(record(tmp_path, ours(), **TENSORS) / "rank0")
    joined, other, notes = join_micro_batches(parts, whole)
    assert "4 micro-batches against 1" in notes[0]
    assert len(joined.calls.keys() ^ other.calls.keys()) <= 1  # a reshape that is a view on one side
    checked = 0
    for call in joined.calls.values():
        for value in (*call.inputs.values(), *call.outputs.values()):
            if value.parts and value.axis is not None and value.floating:
                tensor = load(value).double()
                expected = (tensor.max(), tensor.min(), tensor.mean(), tensor.norm())
                assert value.shape == tensor.shape
                assert value.statistics == pytest.approx(
                    [float(number) for number in expected], rel=1e-5, abs=1e-7
                )
                checked += 1
    assert checked > 50


class Merged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(self.inner(x).chunk(3, -1))


class Separate(nn.Module):
    def __init__(self, merged: Merged) -> None:
        super().__init__()
        for name, weight, bias in zip(
            ("one", "two", "three"), merged.inner.weight.chunk(3), merged.inner.bias.chunk(3), strict=True
        ):
            layer = nn.Linear(8, 8)
            layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.children()]


class Net(nn.Module):
    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self.add_module(name, layer)
        self.layer = [layer]

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.layer[0](x)
        return a * b + c


def run(model: nn.Module) -> None:
    torch.autograd.backward(model(torch.linspace(-1, 1, 32).view(4, 8)).sum())


@pytest.mark.parametrize("swapped", [False, True])
def test_a_map_names_the_parts_of_a_layer(swapped: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    merged = Merged()
    one = record(tmp_path, Net("a", merged), run, **STATISTICS)
    two = record(tmp_path, Net("b", Separate(merged)), run, **STATISTICS)
    if swapped:
        names: dict[str, object] = {"a": "b", "a.inner": ["b.one", "b.two", "b.three"]}
        one, two = two, one
    else:
        names = {"b": "a", "b.one": "a.inner", "b.two": "a.inner", "b.three": "a.inner"}
    target, golden = two, one
    (tmp_path / "map.json").write_text(json.dumps(names))
    arguments = ["compare", "-tp", str(target), "-gp", str(golden), "-o", str(tmp_path / "out")]
    assert main([*arguments, "--map", str(tmp_path / "map.json")]) == 0
    content = json.loads((tmp_path / "out/compare.json").read_text())
    assert content["verdict"] in ("equal", "rounding"), content["first_divergence"]
    assert any("b.one, b.two, b.three are joined" in note for note in content["notes"])
